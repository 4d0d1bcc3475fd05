// The form of every sampling parameter, drawn from what `/about` says of them; knows no parameter by name, but for the
// two mappings from stages, which have rows of their own.

/** A value cannot be read: said at its field, and nothing is sent. */
class FieldError extends Error {}

const unescape = (line) => line.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);

const READERS = {
  int(text) {
    if (!/^[+-]?\d+$/.test(text)) throw new FieldError("a whole number is needed");
    return Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text);
  },
  float(text) {
    if (!Number.isFinite(Number(text))) throw new FieldError("a number is needed");
    return Number(text);
  },
  bool: (text) => text === "true",
  text: (text) => text,
  strings: (text) => text.split("\n").filter((line) => line !== "").map(unescape),
  ids: (text) => text.split(/[\s,]+/).filter(Boolean).map(READERS.int),
  json(text) {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new FieldError(`this is no JSON: ${error.message}`);
    }
  },
};
const HINTS = { strings: "one a line; \\n is a line break", ids: "ids by commas or spaces", json: "JSON" };
const TALL = ["strings", "ids", "json", "text"];

class ParameterForm {
  /** fields: of `/about`, without those that this page decides. onChange is called after each change. */
  constructor(root, fields, stages, onChange) {
    this.inputs = new Map();
    this.root = root;
    this.onChange = onChange;
    for (const [group, members] of grouped(fields)) {
      const rows = members.flatMap((f) => this.rowsOf(f, stages));
      if (rows.length) root.append(el("fieldset", {}, el("legend", { textContent: group }), ...rows));
    }
  }

  rowsOf(field, stages) {
    if (field.name === "stages") {
      return stages.filter((s) => s.switchable).map((s) => this.row({
        name: `stages.${s.key}`, kind: "bool", default: "as deployed", text: `${s.kind}: ${s.params.join(", ") || s.plugin}`,
      }));
    }
    if (field.name === "extra_args") {
      return stages.flatMap((s) => s.extra_args.map((name) => this.row({
        name: `extra_args.${s.key}.${name}`, kind: "json", default: null, text: `of the stage ${s.key}`,
      })));
    }
    return [this.row(field)];
  }

  row(field) {
    const id = `p-${field.name}`;
    const input = control(field, id);
    const wrong = el("p", { className: "wrong", id: `${id}-wrong`, hidden: true });
    const text = [field.text.replaceAll("`", ""), HINTS[field.kind]].filter(Boolean).join("; ");
    const about = el("p", { className: "about", id: `${id}-about`, textContent: text });
    const row = el("div", { className: `field${TALL.includes(field.kind) ? " tall" : ""}` },
      el("label", { htmlFor: id, textContent: field.name }), input, about, wrong);
    input.setAttribute("aria-describedby", `${id}-about ${id}-wrong`);
    input.addEventListener("input", () => {
      row.classList.toggle("set", input.value !== "");
      this.mark(field.name, "");
      this.onChange();
    });
    this.inputs.set(field.name, { input, wrong, row, kind: field.kind });
    return row;
  }

  /** How many fields are filled in. */
  get size() {
    return [...this.inputs.values()].filter(({ input }) => input.value !== "").length;
  }

  /** {parameter: value} of the filled fields. FieldError, said at its field, for one that cannot be read. */
  values() {
    const found = {};
    for (const [name, { input, kind }] of this.inputs) {
      if (input.value.trim() === "") continue;
      put(found, name.split("."), this.read(name, kind, input));
    }
    return found;
  }

  read(name, kind, input) {
    try {
      return READERS[kind](kind === "strings" ? input.value : input.value.trim());
    } catch (error) {
      this.mark(name, error.message);
      input.focus();
      throw new FieldError(`${name}: ${error.message}`);
    }
  }

  /** Says at a field what is wrong with it; an empty text takes that back. False where there is no such field. */
  mark(name, text) {
    const found = this.inputs.get(name);
    if (!found) return false;
    found.wrong.hidden = !text;
    found.wrong.textContent = text;
    found.input.setAttribute("aria-invalid", String(Boolean(text)));
    return true;
  }

  set(name, value) {
    const { input } = this.inputs.get(name);
    input.value = value;
    input.dispatchEvent(new Event("input"));
  }

  reset() {
    for (const name of this.inputs.keys()) this.set(name, "");
  }
}

function control(field, id) {
  const shown = field.default === null || field.default === undefined ? "none" : plainText(field.default);
  if (field.kind === "bool") {
    const options = [["", `${shown}`], ["true", "on"], ["false", "off"]];
    return el("select", { id }, ...options.map(([value, text]) => el("option", { value, textContent: text })));
  }
  const common = { id, placeholder: shown, autocomplete: "off", spellcheck: false };
  if (TALL.includes(field.kind)) return el("textarea", { ...common, rows: 1 });
  return el("input", { ...common, inputMode: field.kind === "int" ? "numeric" : "decimal" });
}

function plainText(value) {
  if (typeof value === "boolean") return value ? "default: on" : "default: off";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function grouped(fields) {
  const groups = new Map();
  for (const field of fields) groups.set(field.group, [...(groups.get(field.group) ?? []), field]);
  return groups;
}

/** Puts a value into nested objects: the last name is a key of the one before it. Keys may hold no dot. */
function put(target, [name, ...rest], value) {
  if (!rest.length) target[name] = value;
  else put((target[name] ??= {}), rest, value);
}
