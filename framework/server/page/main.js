// Puts the page together: tabs, theme, the API key, and what each view needs once the server has said what it is.

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

const isDark = () => (document.documentElement.dataset.theme
  ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function startTheme() {
  const button = byId("theme");
  const show = () => { button.textContent = isDark() ? "Light" : "Dark"; button.title = `Switch to ${button.textContent.toLowerCase()} colours`; };
  button.addEventListener("click", () => {
    applyTheme(isDark() ? "light" : "dark");
    memory.write("localStorage", "framework.theme", document.documentElement.dataset.theme);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

function startTabs(onShow) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (tab) => {
    for (const one of tabs) {
      const isChosen = one === tab;
      one.setAttribute("aria-selected", String(isChosen));
      one.tabIndex = isChosen ? 0 : -1;
      byId(one.getAttribute("aria-controls")).hidden = !isChosen;
    }
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    onShow();
  };
  for (const tab of tabs) {
    tab.dataset.text = tab.textContent; // its bold form keeps the place, so that choosing it moves nothing
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
      next.focus();
      select(next);
    });
  }
  const named = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
  select(named ?? tabs[0]);
}

function say(text) {
  byId("fault").hidden = !text;
  byId("fault").textContent = text;
}

async function start() {
  startTheme();
  let view = null;
  startTabs(() => view?.draw());
  byId("params").open = innerWidth > 760;
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    memory.write("sessionStorage", KEY, byId("key").value);
    location.reload();
  });
  let about;
  try {
    about = await (await ask("/about")).json();
  } catch (error) {
    if (error.status === 401) byId("key-form").hidden = false;
    if (error.status !== 401 || apiKey()) say(error.message);
    byId("send").disabled = true;
    byId("link").dataset.state = "lost";
    setText(byId("link-text"), "not connected");
    return;
  }
  setText(byId("model"), about.name);
  byId("model").title = about.name;
  document.title = `${about.name} · framework`;
  for (const show of [showFacts, showPipeline, showSettings, showPlugins]) show(about);
  new Playground(about);
  view = new LiveView(about.facts.block_size);
  new LiveFeed(view).update();
}

const remembered = memory.read("localStorage", "framework.theme");
if (remembered) applyTheme(remembered);
document.addEventListener("DOMContentLoaded", start);
