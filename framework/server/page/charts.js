// Small charts over the last two minutes, drawn as SVG. They know times and numbers, and nothing of an engine.

const WINDOW_S = 120;
const HEIGHT = 128;
const MARGIN = { left: 38, right: 6, top: 6, bottom: 18 };
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The least of 1, 2, 4, 5, 10, ... that is not below a value: a scale whose labels are round. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((digit) => digit * power).find((limit) => limit >= value * 0.999);
}

class Chart {
  /** series: [{name, className, format}]. Points are {t, values}, with null where nothing is known.
   *  least: what the scale reaches in any case. */
  constructor(title, unit, series, { dots = false, digits = rate, least = 0 } = {}) {
    Object.assign(this, { title, unit, series, dots, digits, least });
    this.labels = series.map(() => el("b", { textContent: NONE }));
    this.svg = svg("svg", { role: "img" });
    const legends = series.map((one, place) => el("span", { className: "legend" },
      el("span", { className: `swatch ${one.className}` }), `${one.name} `, this.labels[place]));
    this.node = el("section", { className: "card chart" },
      el("header", {}, el("h3", {}, title, el("span", { className: "muted small", textContent: unit })), ...legends), this.svg);
  }

  /** Draws points up to `now`, seconds; `shown` are the numbers that the legend tells. */
  draw(points, now, shown) {
    this.series.forEach((_, place) => setText(this.labels[place], this.digits(shown[place])));
    const told = this.series.map((one, place) => `${one.name} ${this.digits(shown[place])}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, ${this.unit}: ${told}`);
    const width = this.svg.clientWidth;
    if (!width) return;
    const top = ceiling(Math.max(this.least, ...points.flatMap(({ values }) => values.map((v) => v ?? 0))));
    const x = (t) => MARGIN.left + (1 - (now - t) / WINDOW_S) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.svg.replaceChildren(...this.axes(width, top, y), ...this.marks(points, x, y));
  }

  axes(width, top, y) {
    const nodes = [0, top / 2, top].flatMap((value) => [
      svg("line", { class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value, top)),
    ]);
    const bottom = HEIGHT - 4;
    return [...nodes, svg("text", { x: MARGIN.left, y: bottom }, `−${WINDOW_S} s`),
      svg("text", { x: width - MARGIN.right, y: bottom, "text-anchor": "end" }, "now")];
  }

  marks(points, x, y) {
    return this.series.flatMap(({ className }, place) => {
      const own = points.map(({ t, values }) => [t, values[place]]);
      if (this.dots) return own.filter(([, v]) => v !== null).map(([t, v]) => svg("circle", { class: className, cx: x(t), cy: y(v), r: 2.5 }));
      return [svg("path", { class: className, d: line(own, x, y) })];
    });
  }
}

/** A value of an axis that ends at `top`: all of its labels have one unit. */
function label(value, top) {
  if (top >= 10000) return `${number(value / 1000)}k`;
  return number(value, value === 0 || value >= 10 || Number.isInteger(value) ? 0 : value < 1 ? 2 : 1);
}

/** A path through points; where one is missing, it breaks. */
function line(points, x, y) {
  let path = "", isDown = false;
  for (const [t, value] of points) {
    if (value !== null) path += `${isDown ? "L" : "M"}${x(t).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = value !== null;
  }
  return path;
}
