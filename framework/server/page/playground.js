// Chat and completions: asks the same routes as every client, and shows what comes as it comes.

/** Parameters that this page decides by itself. */
const DECIDED_HERE = ["output_kind"];
/** What the `openai` client takes by name; the rest travels in its extra_body. */
const OF_OPENAI = ["model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "n", "stop", "seed",
  "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"];

class Playground {
  constructor(about) {
    this.about = about;
    this.turns = []; // messages of the chat so far
    this.running = null; // AbortController of the answer that comes
    const fields = about.params.filter((field) => !DECIDED_HERE.includes(field.name));
    this.form = new ParameterForm(byId("fields"), fields, about.stages, () => this.count());
    this.form.set("logprobs", "5");
    this.listen();
    if (!about.has_chat_template) this.withoutChat();
    this.switch();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("prompt").addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("reset").addEventListener("click", () => this.form.reset());
    byId("colour").addEventListener("change", (event) => this.colour(event.target.checked));
    for (const kind of ["curl", "python"]) byId(`copy-${kind}`).addEventListener("click", (e) => this.copy(kind, e.target));
    for (const radio of document.getElementsByName("mode")) radio.addEventListener("change", () => this.switch());
    byId("colour").checked = memory.read("localStorage", "framework.colour") === "yes";
    this.colour(byId("colour").checked);
  }

  withoutChat() {
    const [chat, completion] = document.getElementsByName("mode");
    chat.disabled = true;
    chat.parentElement.title = "This model has no chat template.";
    completion.checked = true;
  }

  get isChat() {
    return document.querySelector("[name=mode]:checked").value === "chat";
  }

  switch() {
    byId("system-box").hidden = !this.isChat;
    const word = this.isChat ? "Message" : "Prompt";
    byId("prompt").placeholder = word;
    byId("prompt").setAttribute("aria-label", word);
  }

  count() {
    const size = this.form.size;
    byId("num-set").hidden = !size;
    setText(byId("num-set"), `${size} set`);
  }

  colour(isOn) {
    byId("transcript").classList.toggle("coloured", isOn);
    memory.write("localStorage", "framework.colour", isOn ? "yes" : null);
  }

  key(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    if (event.shiftKey && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.send();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    for (const message of [...document.querySelectorAll("#transcript .message")]) message.remove();
    byId("empty").hidden = false;
    byId("prompt").focus();
  }

  // ------------------------------------------------------------------------------------------------ what is asked

  /** [path, body] of the request that the form and the text describe now. */
  request(text) {
    const values = this.form.values();
    const common = { model: this.about.name, stream: true, stream_options: { include_usage: true } };
    if ("prompt_logprobs" in values) values.return_token_ids = true; // which name the prompt's own tokens among others
    if (!this.isChat) return ["/v1/completions", { ...common, prompt: text, ...values }];
    if ("logprobs" in values) {
      values.top_logprobs = values.logprobs;
      values.logprobs = true;
    }
    const system = byId("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    const messages = [...first, ...this.turns, { role: "user", content: text }];
    return ["/v1/chat/completions", { ...common, messages, ...values }];
  }

  async send() {
    const text = byId("prompt").value;
    if (this.running || !text) return;
    let path, body;
    try {
      [path, body] = this.request(text);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      announce(error.message);
      byId("params").open = true;
      return;
    }
    byId("empty").hidden = true;
    byId("prompt").value = "";
    const isChat = this.isChat;
    this.message("user", isChat ? "You" : "Prompt").append(el("div", { className: "text", textContent: text }));
    const answer = new Answer(this.message("assistant", this.about.name), body), turns = this.turns;
    const came = await this.receive(path, body, answer);
    if (turns !== this.turns) return; // it was cleared meanwhile, and this with it
    if (!came) byId("prompt").value ||= text;
    else if (isChat) turns.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  }

  /** Whether an answer came, be it a part. */
  async receive(path, body, answer) {
    this.running = new AbortController();
    this.busy(true);
    try {
      const response = await ask(path, { body, signal: this.running.signal });
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message, { param: chunk.error.param });
        answer.add(chunk);
        this.follow();
      }
      answer.finish();
      announce("The answer is complete.");
    } catch (error) {
      this.fail(error, answer);
    } finally {
      this.running = null;
      this.busy(false);
      this.follow();
    }
    return answer.text !== "";
  }

  fail(error, answer) {
    if (error.name === "AbortError") {
      answer.finish("stopped");
      return;
    }
    const message = error instanceof ServerError ? error.message : `The stream broke off: ${error.message}`;
    answer.fail(message);
    const name = error.param?.split(/[.[]/)[0];
    const field = name === "top_logprobs" ? "logprobs" : name;
    if (field && this.form.mark(field, message)) byId("params").open = true;
  }

  busy(isBusy) {
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("transcript").setAttribute("aria-busy", String(isBusy));
  }

  message(kind, title) {
    const node = el("article", { className: `message ${kind}` }, el("h3", { textContent: title }));
    byId("transcript").append(node);
    this.isAtEnd = true;
    this.follow();
    return node;
  }

  /** Keeps the end in sight of who is there, and leaves alone who has scrolled up to read. */
  follow() {
    const box = byId("transcript");
    const scroller = getComputedStyle(box).overflowY === "visible" ? document.scrollingElement : box;
    const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (gap < 160 || this.isAtEnd) scroller.scrollTop = scroller.scrollHeight;
    this.isAtEnd = false;
  }

  // ------------------------------------------------------------------------------------------------- what is copied

  async copy(kind, button) {
    let text;
    try {
      const [path, body] = this.request(byId("prompt").value || "Hello");
      text = kind === "curl" ? asCurl(path, body) : asPython(path, body);
    } catch (error) {
      if (error instanceof FieldError) return;
      throw error;
    }
    await toClipboard(text);
    const before = button.textContent;
    button.textContent = "Copied";
    announce("Copied to the clipboard.");
    setTimeout(() => { button.textContent = before; }, 1500);
  }
}

/** One answer as it comes: a text for each of its n completions, and what it cost. */
class Answer {
  constructor(node, { n = 1, prompt = null }) {
    this.start = performance.now();
    this.first = this.last = null;
    this.usage = null;
    this.asked = prompt;
    this.hasPrompt = false;
    this.node = node;
    this.ofAll = n > 1 ? ` of ${n}` : null;
    this.choices = [];
    this.choice(0);
  }

  /** The completion of this index. Made when it comes: the server has the last word on how many there are. */
  choice(index) {
    while (this.choices.length <= index) {
      const text = new TokenText(this.ofAll ? `Completion ${this.choices.length + 1}${this.ofAll}` : "Answer");
      const note = el("div", { className: "note" });
      this.node.append(el("div", { className: "choice" }, text.node, note));
      this.choices.push({ text, note, reason: null });
    }
    return this.choices[index];
  }

  get text() {
    return this.choices[0].text.text;
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.prompt(chunk);
    for (const choice of chunk.choices ?? []) {
      this.prompt(choice);
      const own = this.choice(choice.index);
      const text = choice.delta ? choice.delta.content ?? "" : choice.text ?? "";
      const tokens = tokensOf(choice.logprobs);
      own.reason = choice.finish_reason ?? own.reason;
      if (!text && !tokens.length) continue;
      this.last = performance.now();
      this.first ??= this.last;
      own.text.add(text, tokens);
    }
  }

  /** Shows the tokens of the prompt, where the server tells their logprobs. */
  prompt({ prompt_logprobs: entries, prompt_token_ids: ids }) {
    if (!entries || !ids || this.hasPrompt) return;
    this.hasPrompt = true; // each completion tells it again
    const text = new TokenText("Prompt, token by token");
    const tokens = entries.map((entry, place) => promptToken(entry, ids[place]));
    const rest = tokens.slice(1).map(({ token }) => token).join("");
    if (this.asked?.endsWith(rest)) tokens[0].token = this.asked.slice(0, this.asked.length - rest.length);
    text.add(tokens.map(({ token }) => token).join(""), tokens);
    const box = el("details", { className: "prompt-tokens" }, el("summary", { textContent: `${tokens.length} prompt tokens` }), text.node);
    this.node.insertBefore(box, this.node.children[1]);
  }

  finish(reason) {
    for (const choice of this.choices) {
      if (!reason) choice.text.finish();
      const words = [reason ?? (choice.reason ? `finish: ${choice.reason}` : "")];
      if (choice === this.choices[0]) words.unshift(...this.cost());
      choice.note.replaceChildren(...words.filter(Boolean).map((word) => el("span", { textContent: word })));
    }
  }

  /** Times are those seen here, the way to the server included. */
  cost() {
    const { prompt_tokens: before, completion_tokens: after, prompt_tokens_details: details } = this.usage ?? {};
    const words = [];
    if (this.usage) {
      const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
      words.push(`${number(before)} prompt${cached} + ${number(after)} output tokens`);
    }
    if (this.first !== null) words.push(`TTFT ${spoken((this.first - this.start) / 1000)}`);
    const num = this.choices.length, seconds = (this.last - this.first) / 1000;
    if (after > num && seconds > 0) {
      words.push(`TPOT ${spoken(seconds / (after / num - 1))}`, `${rate((after - num) / seconds)} tokens/s`);
    }
    return words;
  }

  fail(message) {
    if (this.first !== null) this.finish();
    else for (const { note } of this.choices) note.parentElement.remove();
    const node = el("div", { className: "error", textContent: message });
    node.setAttribute("role", "alert");
    this.node.append(node);
  }
}

/** [{token, bytes, logprob, top}] of a chunk of either route. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((one) => ({ ...one, top: one.top_logprobs }));
  return (logprobs.tokens ?? []).map((token, place) => ({
    token,
    logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).map(([text, logprob]) => ({ token: text, logprob })),
  }));
}

/** A token of the prompt. Nothing predicts the first one, and so nothing tells its text. */
function promptToken(entry, id) {
  const own = entry?.[id];
  const top = Object.entries(entry ?? {}).map(([other, one]) => ({ token: one.decoded_token ?? `#${other}`, logprob: one.logprob }));
  return { token: own?.decoded_token ?? `#${id}`, logprob: own ? own.logprob : 0, top };
}

// ------------------------------------------------------------------------------------------------------ as commands

function asCurl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = apiKey() ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  return `curl -N ${quoted(location.origin + path)} \\\n  -H 'Content-Type: application/json'${key} \\\n`
    + `  -d ${quoted(toJson(body, 1))}\n`;
}

function asPython(path, body) {
  const call = path.includes("chat") ? "chat.completions" : "completions";
  const known = Object.entries(body).filter(([name]) => OF_OPENAI.includes(name));
  const extra = Object.entries(body).filter(([name]) => !OF_OPENAI.includes(name));
  const lines = known.map(([name, value]) => `    ${name}=${python(value)},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra))},`);
  const key = apiKey() ? 'os.environ["API_KEY"]' : '"none"';
  const piece = path.includes("chat") ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${apiKey() ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url=${python(`${location.origin}/v1`)}, api_key=${key})\n`
    + `stream = client.${call}.create(\n${lines.join("\n")}\n)\nfor chunk in stream:\n    if chunk.choices:\n`
    + `        print(${piece} or "", end="", flush=True)\n`;
}

/** A value of JSON as Python writes it. */
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, inner]) => `${JSON.stringify(key)}: ${python(inner)}`).join(", ")}}`;
  }
  return typeof value === "string" ? JSON.stringify(value) : String(value);
}

/** Browsers hand the clipboard to pages of secure origins alone; the old way serves the others. */
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = el("textarea", { value: text, className: "unseen" });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}
