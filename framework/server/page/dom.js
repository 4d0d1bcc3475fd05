// Elements, numbers with units, and what is remembered. No part of the page is known here.

const byId = (id) => document.getElementById(id);

/** An element with properties and children. Text is always text: nothing a model says becomes markup. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Writes a text where it is another one, so that what stays the same is not laid out again. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (digits === 0) return whole.format(value);
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** [value, unit] of a time: milliseconds below one second. */
function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return [NONE, ""];
  if (seconds >= 1) return [number(seconds, seconds < 10 ? 2 : 1), "s"];
  const ms = seconds * 1000;
  return [number(ms, ms < 10 ? 2 : ms < 100 ? 1 : 0), "ms"];
}

const spoken = (seconds) => duration(seconds).join(" ").trim();

function percent(share, digits = 1) {
  return Number.isFinite(share) ? `${number(share * 100, digits)} %` : NONE;
}

/** The middle, or another quantile, of numbers in any order; null of none. */
function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** A rate in a fitting number of digits. */
const rate = (value) => number(value, Math.abs(value) < 10 ? 1 : 0);

/** Told to whoever listens to the page instead of looking at it. */
function announce(text) {
  byId("announce").textContent = text;
}

/** Storage that may be forbidden: then nothing is remembered, and everything else works. */
const memory = {
  read(store, key) {
    try { return window[store].getItem(key); } catch { return null; }
  },
  write(store, key, value) {
    try {
      if (value === null) window[store].removeItem(key);
      else window[store].setItem(key, value);
    } catch { /* forbidden: the choice holds until the page is left */ }
  },
};
