// Tokens of an answer: their text, their probability as a colour, and what else might have stood there.

/** The class of a token's colour: none from 90 % on, the strongest below 5 %. */
function shade(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.9 ? "p0" : p >= 0.5 ? "p1" : p >= 0.2 ? "p2" : p >= 0.05 ? "p3" : "p4";
}

/** The text of one completion, with a span for each token that came with its logprob. */
class TokenText {
  constructor(label) {
    this.node = el("div", { className: "text" });
    this.node.setAttribute("role", "group");
    this.node.setAttribute("aria-label", label);
    this.tokens = [];
    this.text = "";
    this.decoder = new TextDecoder();
    this.current = -1;
    this.node.addEventListener("pointerover", (event) => this.point(event.target));
    this.node.addEventListener("pointerleave", () => this.leave());
    this.node.addEventListener("focus", () => this.move(Math.max(this.current, 0)));
    this.node.addEventListener("blur", () => this.leave());
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  /** Adds what a chunk brought: text, and its tokens where they were asked for. */
  add(text, tokens) {
    this.text += text;
    if (!tokens.length && text) this.node.append(text);
    for (const token of tokens) this.node.append(this.span(token));
    if (tokens.length) this.node.tabIndex = 0;
  }

  /** A character may take several tokens: it is shown with the one that completes it. */
  span(token) {
    const shown = token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
    const node = el("span", { className: `token ${shade(token.logprob)}`, textContent: shown });
    node.dataset.at = this.tokens.length;
    this.tokens.push({ ...token, node, shown });
    return node;
  }

  /** Dims tokens behind the end of the text: an end-of-sequence token, or a stop string. */
  finish() {
    let length = 0;
    for (const { node, shown, token } of this.tokens) {
      length += shown.length;
      if (length <= this.text.length) continue;
      node.classList.add("beyond");
      if (!shown) node.textContent = token;
    }
  }

  point(target) {
    if (target.dataset?.at !== undefined) this.show(Number(target.dataset.at));
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.move(Math.min(Math.max(this.current + steps[event.key], 0), this.tokens.length - 1));
  }

  move(place) {
    if (!this.tokens.length) return;
    this.show(place);
    const { node, token, logprob } = this.tokens[place];
    node.scrollIntoView({ block: "nearest" });
    announce(`${JSON.stringify(token)}, ${percent(Math.exp(logprob))}`);
  }

  show(place) {
    this.unmark();
    this.current = place;
    this.tokens[place].node.classList.add("current");
    popover.show(this.tokens[place]);
  }

  unmark() {
    this.tokens[this.current]?.node.classList.remove("current");
  }

  leave() {
    this.unmark();
    popover.hide();
  }
}

const popover = {
  show(token) {
    const node = byId("popover");
    node.replaceChildren(...described(token));
    node.hidden = false;
    const box = (token.node.getClientRects()[0] ?? token.node.getBoundingClientRect());
    const { offsetWidth: width, offsetHeight: height } = node;
    const below = box.bottom + 8 + height <= window.innerHeight;
    node.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - width - 8))}px`;
    node.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
  },
  hide() {
    byId("popover").hidden = true;
  },
};

/** The token and its alternatives, the likeliest first. */
function described(token) {
  const own = { token: token.token, logprob: token.logprob };
  const others = (token.top ?? []).filter((one) => one.token !== token.token);
  const rows = [own, ...others].sort((a, b) => (b.logprob ?? -Infinity) - (a.logprob ?? -Infinity));
  return [
    el("div", { className: "row" }, el("span", { className: "own clip", textContent: JSON.stringify(token.token) }),
      el("span", { className: "muted", textContent: `logprob ${number(token.logprob, 3)}` })),
    ...rows.map((one) => alternative(one, one === own)),
  ];
}

function alternative({ token, logprob }, isChosen) {
  const p = logprob === null ? 0 : Math.exp(logprob);
  const bar = el("i");
  bar.style.width = `${p * 100}%`;
  return el("div", { className: `alternative${isChosen ? " chosen" : ""}` },
    el("code", { className: "clip", textContent: JSON.stringify(token) }), el("div", { className: "gauge" }, bar),
    el("span", { className: "num", textContent: percent(p) }));
}
