// The live view: what `/live/events` says, as numbers, charts and rows. The server sends nothing to a hidden page.

const MAX_WAIT_S = 10;
/** Ended requests that are kept at most: each is a dot in two charts. */
const MAX_ENDED = 1000;
const TILES = [
  ["running", "Running"], ["waiting", "Waiting"], ["decode", "Output"], ["prefill", "Prefill"],
  ["ttft", "TTFT, median"], ["tpot", "TPOT, median"], ["hits", "Prefix hits"], ["preemptions", "Preemptions"],
];

/** Keeps the connection while the page is visible, and comes back by itself when it is lost. */
class LiveFeed {
  constructor(view) {
    this.view = view;
    this.connection = null;
    document.addEventListener("visibilitychange", () => this.update());
  }

  update() {
    if (document.hidden) this.pause();
    else if (!this.connection) this.run();
  }

  pause() {
    this.connection?.abort();
    this.connection = null;
    this.view.link("paused", "paused");
    this.view.gap();
  }

  async run() {
    const connection = this.connection = new AbortController();
    for (let wait = 1; !connection.signal.aborted; wait = Math.min(wait * 2, MAX_WAIT_S)) {
      let reason = "";
      try {
        for await (const { event, data } of events(await ask("/live/events", { signal: connection.signal }))) {
          this.view.hear(event, JSON.parse(data));
          wait = 1;
        }
      } catch (error) {
        if (error.name !== "AbortError") console.warn(`live view: ${error.message}`);
        reason = error instanceof ServerError ? error.message : "";
      }
      if (connection.signal.aborted) return;
      this.view.link("lost", reason ? "refused" : "reconnecting", reason);
      this.view.gap();
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }
}

class LiveView {
  constructor(blockSize) {
    this.blockSize = blockSize;
    this.points = []; // {t, values} by chart, one a frame
    this.ended = new Map(); // requests by their number
    this.before = null; // the last frame
    this.tiles = new Map(TILES.map(([key, title]) => [key, tile(title)]));
    byId("tiles").append(...[...this.tiles.values()].map(({ node }) => node));
    const two = (a, b) => [{ name: a, className: "decode" }, { name: b, className: "prefill" }];
    this.charts = {
      throughput: new Chart("Throughput", "tokens/s", two("output", "prefill")),
      step: new Chart("Tokens a step", "mean", two("output", "prefill")),
      queue: new Chart("Requests", "", [{ name: "running", className: "decode" }, { name: "waiting", className: "waiting" }], { digits: number, least: 4 }),
      kv: new Chart("KV blocks in use", "%", [{ name: "used", className: "decode" }], { least: 100 }),
      ttft: new Chart("TTFT", "ms, ended requests", [{ name: "p50", className: "decode" }], { dots: true }),
      tpot: new Chart("TPOT", "ms, ended requests", [{ name: "p50", className: "decode" }], { dots: true }),
    };
    byId("charts").append(...Object.values(this.charts).map(({ node }) => node));
  }

  /** why: the server's own words, where it refuses. */
  link(state, text, why = "") {
    byId("link").dataset.state = state;
    byId("link").title = why;
    setText(byId("link-text"), text);
  }

  /** Lines break where nothing was heard. */
  gap() {
    if (this.before) this.points.push({ t: this.before.time + 0.001, values: null });
    this.before = null;
  }

  hear(event, state) {
    if (event === "history") this.ended.clear(); // all that the server knows, which may be another one by now
    for (const one of state.ended) this.ended.set(one.number, one);
    while (this.ended.size > MAX_ENDED) this.ended.delete(this.ended.keys().next().value);
    if (event === "frame") this.frame(state);
  }

  frame(state) {
    const rates = this.rates(state);
    this.before = state;
    this.points.push({ t: state.time, values: rates });
    this.points = this.points.filter(({ t }) => t > state.time - WINDOW_S);
    for (const [key, { time }] of this.ended) if (time < state.time - WINDOW_S) this.ended.delete(key);
    const { num_running: running } = state.stats;
    this.link("live", running ? `${number(running)} running` : "idle");
    if (!byId("live").hidden) this.draw();
  }

  /** What happened between two frames; null before there are two. */
  rates(state) {
    const { stats, time } = state, pool = blocks(stats);
    const now = { running: stats.num_running, waiting: stats.num_waiting, kv: (100 * pool.used) / pool.total };
    if (!this.before || time <= this.before.time) return { ...now, output: null, prefill: null, outputStep: null, prefillStep: null };
    const old = this.before.stats, seconds = time - this.before.time;
    const steps = stats.num_steps - old.num_steps;
    const output = stats.decode_tokens - old.decode_tokens, prefill = stats.prefill_tokens - old.prefill_tokens;
    const each = (count) => (steps ? count / steps : 0);
    const parts = Object.entries(stats.step_seconds).map(([part, sum]) => [part, each(sum - (old.step_seconds[part] ?? 0))]);
    if (steps) this.parts = parts;
    return { ...now, output: output / seconds, prefill: prefill / seconds, outputStep: each(output), prefillStep: each(prefill) };
  }

  draw() {
    const state = this.before;
    if (!state) return;
    const shown = this.points.at(-1).values;
    const ended = [...this.ended.values()];
    this.drawTiles(state.stats, this.recent(), ended);
    this.drawCharts(state.time, shown, ended);
    drawPool(state.stats, this.blockSize);
    drawParts(this.parts ?? []);
    drawBatch(state);
  }

  /** Mean rates of the last second: a number that can be read. */
  recent() {
    const last = this.points.slice(-4).map(({ values }) => values).filter((v) => v && v.output !== null);
    const mean = (key) => (last.length ? last.reduce((sum, v) => sum + v[key], 0) / last.length : null);
    return { output: mean("output"), prefill: mean("prefill") };
  }

  drawTiles(stats, recent, ended) {
    const share = stats.prefix_query_tokens ? stats.prefix_hit_tokens / stats.prefix_query_tokens : NaN;
    const values = {
      running: [number(stats.num_running), ""],
      waiting: [number(stats.num_waiting), ""],
      decode: [rate(recent.output), "tokens/s"],
      prefill: [rate(recent.prefill), "tokens/s"],
      ttft: duration(quantile(known(ended, "ttft_s"), 0.5)),
      tpot: duration(quantile(known(ended, "tpot_s"), 0.5)),
      hits: Number.isNaN(share) ? [NONE, ""] : [number(share * 100, 1), "%"],
      preemptions: [number(stats.num_preemptions), ""],
    };
    for (const [key, [value, unit]] of Object.entries(values)) this.tiles.get(key).set(value, unit);
  }

  drawCharts(now, shown, ended) {
    const line = (chart, ...keys) => this.charts[chart].draw(
      this.points.map(({ t, values }) => ({ t, values: keys.map((key) => values?.[key] ?? null) })), now, keys.map((key) => shown[key]));
    line("throughput", "output", "prefill");
    line("step", "outputStep", "prefillStep");
    line("queue", "running", "waiting");
    line("kv", "kv");
    for (const [chart, key] of [["ttft", "ttft_s"], ["tpot", "tpot_s"]]) {
      const points = ended.filter((one) => one[key] !== null).map((one) => ({ t: one.time, values: [one[key] * 1000] }));
      this.charts[chart].draw(points, now, [quantile(points.map(({ values }) => values[0]), 0.5)]);
    }
  }
}

const known = (ended, key) => ended.map((one) => one[key]).filter((value) => value !== null);

/** Blocks by state; the null block is nobody's. Schedulers that count no cached blocks tell them as free ones. */
function blocks(stats) {
  const total = stats.num_blocks - 1, cached = stats.num_cached_blocks ?? 0;
  return { total, cached, used: total - stats.num_free_blocks, free: stats.num_free_blocks - cached };
}

function tile(title) {
  const value = el("span", { textContent: NONE }), unit = el("small");
  const node = el("div", {}, el("dt", { textContent: title }), el("dd", {}, value, unit));
  return { node, set(text, word) { setText(value, text); setText(unit, word); } };
}

function drawPool(stats, blockSize) {
  const pool = blocks(stats), node = byId("pool");
  setText(byId("pool-total"), `${number(pool.total)} blocks of ${blockSize} tokens`);
  if (!node.childElementCount) {
    node.append(el("div", { className: "gauge" }, el("i"), el("i", { className: "cached" })),
      el("div", { className: "keys-row" }, ...["used", "cached", "free"].map((state) => el("span", { className: "legend" },
        el("span", { className: `swatch ${state}` }), `${state} `, el("b", { id: `pool-${state}` })))));
  }
  const [used, cached] = node.querySelectorAll("i");
  used.style.width = `${(100 * pool.used) / pool.total}%`;
  cached.style.width = `${(100 * pool.cached) / pool.total}%`;
  for (const state of ["used", "cached", "free"]) setText(byId(`pool-${state}`), number(pool[state]));
}

function drawParts(parts) {
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0), node = byId("parts");
  setText(byId("step-total"), total ? `${spoken(total)}, by part` : "no step yet");
  while (node.childElementCount < parts.length) {
    node.append(el("div", { className: "part" }, el("span"), el("div", { className: "gauge" }, el("i")), el("span", { className: "num" })));
  }
  parts.forEach(([part, seconds], place) => {
    const [name, gauge, value] = node.children[place].children;
    setText(name, part);
    gauge.firstChild.style.width = total ? `${(100 * seconds) / total}%` : "0";
    setText(value, spoken(seconds));
  });
}

function drawBatch(state) {
  const body = byId("batch").tBodies[0];
  byId("idle").hidden = state.rows.length > 0;
  byId("batch").hidden = !state.rows.length;
  setText(byId("batch-note"), state.num_left_off ? `${state.rows.length} shown, ${number(state.num_left_off)} more` : "");
  while (body.rows.length > state.rows.length) body.deleteRow(-1);
  while (body.rows.length < state.rows.length) body.append(batchRow());
  state.rows.forEach((row, place) => {
    fillRow(body.rows[place].cells, Object.fromEntries(state.columns.map((name, column) => [name, row[column]])));
  });
}

function batchRow() {
  const cell = (className = "") => el("td", { className });
  const gauge = el("div", { className: "gauge" }, el("i", { className: "prefill" }), el("i"));
  return el("tr", {}, cell(), cell(), cell("num"), cell("num wide"), cell("num"), el("td", { className: "progress-cell" }, gauge),
    cell("num wide"), cell("num wide"), cell("num wide"));
}

function fillRow(cells, row) {
  const texts = [row.id, row.phase, number(row.prompt), number(row.computed), number(row.output), null,
    number(row.cached), number(row.blocks), `${number(row.age_s, 1)} s`];
  texts.forEach((text, place) => { if (text !== null) setText(cells[place], text); });
  cells[0].title = row.id;
  cells[1].className = `phase-${row.phase}`;
  const [prefill, decode] = cells[5].firstChild.children;
  prefill.style.width = `${(100 * Math.min(row.computed, row.prompt)) / row.limit}%`;
  decode.style.width = `${(100 * row.output) / row.limit}%`;
  cells[5].firstChild.title = `${number(row.prompt + row.output)} of at most ${number(row.limit)} tokens`;
}
