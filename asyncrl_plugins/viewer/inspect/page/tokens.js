// Tokens of one completion as spans, and a card that tells all about the one under the pointer or the cursor.
// Text is only ever set as text: what a model wrote is never read as HTML.
const Tokens = (() => {
  "use strict";
  const COLOURINGS = ["diff", "version", "mask", "logprob"];
  const AT_ONCE = 4000; // spans of a completion that are made before somebody asks for more

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) made.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  // Control, formatting and private characters are shown as escapes; a line break is shown and made.
  function visible(text, lines = true) {
    return text.replace(/[\p{C}\u2028\u2029]/gu, (character) => {
      if (character === "\n") return lines ? "↵\n" : "↵";
      if (character === "\t") return "→";
      const code = character.codePointAt(0).toString(16);
      return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : code.length <= 4 ? `\\u${code.padStart(4, "0")}` : `\\U${code.padStart(8, "0")}`;
    });
  }

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    const rounded = Math.abs(value) >= 1e5 ? value.toExponential(2) : value.toFixed(digits);
    return (Number(rounded) === 0 ? rounded.replace("-", "") : rounded).replace("-", "−");
  }

  function tokenSpans(completion, start, end) {
    const some = document.createDocumentFragment();
    for (let i = start; i < end; i++) {
      const span = document.createElement("span");
      span.textContent = visible(completion.tokens[i]) || "∅";
      span.dataset.i = i;
      for (const colouring of COLOURINGS) {
        const level = completion.levels[colouring][i];
        if (level !== "0") span.dataset[colouring] = level;
      }
      some.append(span);
    }
    return some;
  }

  // `completion`: tokens, token_ids, logprobs, learner_logprobs, versions, consumed_at, levels; each a list of one length.
  function render(completion, colouring, label) {
    const length = completion.tokens.length;
    const box = element("div", { class: "tokens", "data-colour": colouring, tabindex: "0", role: "group",
      "aria-label": `${label}: ${length} tokens. Arrow keys move through them.` });
    box.append(tokenSpans(completion, 0, Math.min(length, AT_ONCE)));
    let shown = Math.min(length, AT_ONCE);
    if (shown < length) {
      const more = element("button", { type: "button", class: "more-tokens" });
      const name = () => { more.textContent = `${(length - shown).toLocaleString("en")} more tokens`; };
      name();
      more.addEventListener("click", () => {
        const next = Math.min(length, shown + AT_ONCE);
        more.before(tokenSpans(completion, shown, next));
        shown = next;
        if (shown < length) name();
        else more.remove();
      });
      box.append(more);
    }
    explain(box, completion);
    return box;
  }

  function facts(completion, i) {
    const sampled = completion.levels.mask[i] !== "u";
    const ours = completion.learner_logprobs?.[i] ?? null;
    const its = completion.logprobs[i];
    const behind = completion.consumed_at - completion.versions[i];
    const put = i < completion.put_there;
    const part = { 0: "in the loss", u: put ? "not sampled: put there" : "not sampled: the environment's", x: "taken out by the correction" };
    const rows = [["token", `${(i + 1).toLocaleString("en")} of ${completion.tokens.length.toLocaleString("en")}`],
      ["id", String(completion.token_ids[i])]];
    if (sampled) {
      const share = its === null ? "" : ` (${(100 * Math.exp(its)).toPrecision(3)} %)`;
      rows.push(["engine log-prob", number(its) + share], ["learner log-prob", ours === null ? "not measured" : number(ours)],
        ["difference", ours === null || its === null ? "–" : (ours > its ? "+" : "") + number(ours - its)],
        ["policy version", behind > 0 ? `${completion.versions[i]} (${behind} behind)` : String(completion.versions[i])]);
    }
    if (put) rows.push(["learner log-prob", ours === null ? "not measured" : number(ours)]);
    rows.push(["mask", part[completion.levels.mask[i]]]);
    return rows;
  }

  let card = null;
  function explain(box, completion) {
    let current = -1;
    const show = (span) => {
      const i = Number(span.dataset.i);
      card ??= document.body.appendChild(element("div", { class: "token-card", role: "status" }));
      card.replaceChildren(element("code", {}, visible(completion.tokens[i], false) || "∅"),
        element("dl", {}, ...facts(completion, i).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
      card.hidden = false;
      const place = span.getClientRects()[0];
      const left = Math.min(place.left, document.documentElement.clientWidth - card.offsetWidth - 8);
      const below = place.bottom + 6 + card.offsetHeight <= window.innerHeight;
      card.style.left = `${Math.max(8, left) + window.scrollX}px`;
      card.style.top = `${(below ? place.bottom + 6 : place.top - card.offsetHeight - 6) + window.scrollY}px`;
    };
    const hide = () => { if (card) card.hidden = true; };
    const spanOf = (event) => event.target.closest?.("span[data-i]");
    box.addEventListener("pointerover", (event) => { const span = spanOf(event); if (span) show(span); });
    box.addEventListener("pointerleave", hide);
    const mark = (next) => {
      box.querySelector(".current")?.classList.remove("current");
      current = next;
      const span = box.querySelector(`span[data-i="${next}"]`);
      if (!span) return;
      span.classList.add("current");
      span.scrollIntoView({ block: "nearest" });
      show(span);
    };
    box.addEventListener("click", (event) => { const span = spanOf(event); if (span) mark(Number(span.dataset.i)); });
    box.addEventListener("keydown", (event) => {
      const last = box.querySelectorAll("span[data-i]").length - 1;
      const next = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: last }[event.key];
      if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      mark(Math.max(0, Math.min(last, next)));
    });
    box.addEventListener("blur", () => { box.querySelector(".current")?.classList.remove("current"); current = -1; hide(); });
  }

  function legend(colouring, entries) {
    return element("ul", { class: "legend", "aria-label": "Meaning of the colours" }, ...entries.map(([level, meaning]) =>
      element("li", {}, element("span", { class: "swatch", [`data-${colouring}`]: level, "aria-hidden": "true" }), ` ${meaning}`)));
  }

  return { element, visible, number, render, legend, COLOURINGS };
})();
