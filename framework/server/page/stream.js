// Talks to the server this page came from: JSON, and server-sent events over fetch, which can carry an API key.

class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const KEY = "framework.key";
const apiKey = () => memory.read("sessionStorage", KEY);

function headers() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** JSON text in which whole numbers beyond 2^53, such as seeds, stay whole. */
function toJson(value, indent) {
  const mark = (_, inner) => (typeof inner === "bigint" ? `\u0001${inner}\u0001` : inner);
  return JSON.stringify(value, mark, indent).replace(/"\\u0001(-?\d+)\\u0001"/g, "$1");
}

/** The response to a request; ServerError with the server's own words when it is none of success. */
async function ask(path, { body, signal } = {}) {
  const options = { headers: headers(), signal };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = toJson(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* no JSON: the status says all there is */ }
  const wait = response.headers.get("retry-after");
  const message = (error.message ?? `The server answered ${response.status} ${response.statusText}.`)
    + (wait ? ` Try again in ${wait} s.` : "");
  return new ServerError(message, { status: response.status, param: error.param });
}

/** {event, data} of each server-sent event of a response, data as text. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const found = parseEvent(block);
      if (found.data) yield found;
    }
  }
}

function parseEvent(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split(/\r?\n/)) {
    const [, name, text] = /^(event|data): ?(.*)$/.exec(line) ?? [];
    if (name === "event") found.event = text;
    if (name === "data") found.data += (found.data ? "\n" : "") + text;
  }
  return found;
}
