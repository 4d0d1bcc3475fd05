// The resolved configuration, the pipeline and the plugins, as `/about` tells them.

/** columns: [title, class]; of the classes, `wide` columns go first where there is little room. */
function fillTable(table, columns, rows) {
  const cell = (tag, place, ...inner) => el(tag, { className: columns[place][1] ?? "" }, ...inner);
  table.replaceChildren(
    el("thead", {}, el("tr", {}, ...columns.map(([title], place) => cell("th", place, title)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((inner, place) => cell("td", place, inner))))),
  );
}

/** Shows the rows of a table that hold every word of the input. */
function filterBy(input, table) {
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}

const code = (text) => el("code", { textContent: text });
const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function showFacts(about) {
  const { seconds, why_async: why, ...facts } = about.facts;
  const rows = [["version", about.version], ...Object.entries(facts), ["start-up", spoken(seconds.total)]];
  byId("facts").replaceChildren(...rows.map(([name, value]) => el("div", {},
    el("dt", { textContent: name }), el("dd", { textContent: fact(name, value), title: name === "async_scheduling" ? why : "" }))));
}

function fact(name, value) {
  if (name.endsWith("bytes")) return `${number(value / 1e6, 1)} MB`;
  return typeof value === "number" ? number(value) : written(value);
}

function showPipeline(about) {
  const rows = about.stages.map((stage, place) => [String(place + 1), code(stage.key), stage.kind ?? NONE,
    code(stage.params.join(", ") || NONE), stage.switchable ? "yes" : "no"]);
  fillTable(byId("pipeline"), [["", "wide"], ["Stage"], ["Kind"], ["Reads", "any"], ["Switchable", "wide"]], rows);
}

function showSettings(about) {
  const isTold = about.settings.some(({ source }) => source);
  const rows = about.settings.map(({ key, value, source, where }) => {
    const cells = [code(key), code(written(value))];
    return isTold ? [...cells, source, code(where)] : cells;
  });
  fillTable(byId("settings"), [["Key"], ["Value", "any"], ...(isTold ? [["Set by"], ["Where"]] : [])], rows);
  filterBy(byId("config-filter"), byId("settings"));
}

function showPlugins(about) {
  const rows = about.plugins.map((one) => [one.kind, code(one.name), one.dist, one.version, one.api, state(one)]);
  fillTable(byId("components"), [["Kind"], ["Name"], ["Distribution", "wide"], ["Version", "wide"], ["API", "wide"], ["State", "any"]], rows);
  filterBy(byId("plugin-filter"), byId("components"));
  const failures = about.left_out.map((text) => el("p", { className: "wrong", textContent: `Left out: ${text}` }));
  byId("left-out").replaceChildren(...failures);
}

function state(one) {
  const word = el("span", { className: `state ${one.state}`, textContent: one.state });
  return one.reason ? el("span", {}, word, el("span", { className: "muted small", textContent: ` ${one.reason}` })) : word;
}
