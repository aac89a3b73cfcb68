// One group: its images, its prompt, and its completions.
const Group = (() => {
  "use strict";
  const { element, visible, number, render, legend } = Tokens;
  const SMALL_PIXELS = 160; // pictures below this width are enlarged, pixel by pixel

  // Until somebody chooses one, each group opens with the colouring that tells most about it.
  const colouring = () => Address.colouring(group.colouring);
  const place = () => document.getElementById("group");
  let group = null, colourings = [], choose = () => {};

  // Green and red are what the learner makes of it: more likely, or less.
  const rewardClass = ({ reward, advantage }) => (reward === null ? "soft" : advantage > 0 ? "good" : advantage < 0 ? "bad" : "");

  function picture(facts, ticket, i, count) {
    if (facts.problem) return element("figure", {}, element("figcaption", {}, `image ${i + 1}: ${visible(facts.problem)} (${facts.hash.slice(0, 12)}…)`));
    const source = `/image/${encodeURIComponent(facts.hash)}?ticket=${encodeURIComponent(ticket)}`;
    const scale = facts.width < SMALL_PIXELS ? Math.min(4, Math.floor(2 * SMALL_PIXELS / facts.width)) : 1;
    // With its height the place is there before the picture is: what is scrolled to stays where it is.
    const image = (width, zoomed) => element("img", { src: source, width, height: Math.round(width * facts.height / facts.width), class: scale > 1 || zoomed ? "pixels" : false,
      alt: `Image ${i + 1} of ${count}, ${facts.width} by ${facts.height} pixels` });
    const button = element("button", { type: "button", title: "Enlarge" }, image(facts.width * scale, false));
    button.addEventListener("click", () => {
      const large = document.getElementById("picture");
      large.replaceChildren(image(facts.width * Math.max(1, Math.floor(0.9 * window.innerWidth / facts.width)), facts.width < 600));
      large.showModal();
    });
    const video = facts.frames ? `first of ${facts.frames} frames, ` : "";
    return element("figure", {}, button, element("figcaption", {},
      `${video}${facts.width} × ${facts.height} ${facts.format}, ${(facts.bytes / 1024).toFixed(1)} KiB, `,
      element("span", { title: facts.hash }, `${facts.hash.slice(0, 8)}…`)));
  }

  // What an environment showed: texts and pictures at their places.
  function shown(messages) {
    return messages.map((message) => element("div", { class: "shown" }, element("span", { class: "soft" }, visible(message.role)),
      ...message.parts.map((part) => (typeof part === "string" ? element("span", { class: "text" }, visible(part)) : picture(part, group.ticket_id, 0, 1)))));
  }

  // What a turn called, with what became of it, and the environment's facts.
  function called({ calls, info }) {
    const made = calls.map((call) => element("p", { class: "turn" }, element("span", { class: "soft" }, "call "), element("b", {}, visible(call.name) || "–"),
      ` ${visible(call.arguments)} `, element("span", { class: call.error_kind ? "bad" : "soft" },
        call.error_kind ? `${call.error_kind}: ${visible(call.error)}` : "ok"), call.seconds ? ` ${number(call.seconds, 2)} s` : ""));
    const facts = Object.keys(info).length ? [element("p", { class: "turn soft" }, visible(JSON.stringify(info)))] : [];
    return [...made, ...facts];
  }

  // The tokens of one turn as a completion of their own.
  function partOf(one, { start, end }) {
    const cut = (column) => (column === null ? null : column.slice(start, end));
    const levels = Object.fromEntries(Object.entries(one.levels).map(([name, column]) => [name, cut(column)]));
    const columns = ["tokens", "token_ids", "logprobs", "learner_logprobs", "versions"].map((name) => [name, cut(one[name])]);
    return { ...one, ...Object.fromEntries(columns), levels };
  }

  // The history with which a new segment begins before a turn, where it was rewritten.
  function rewritten(one, { start, context }, i) {
    if (!context) return [];
    const history = { start: start - context, end: start };
    return [element("p", { class: "turn warn" }, element("b", {}, "new segment"), ` ${context} tokens of history, as it is shown from here on`),
      render(partOf(one, history), colouring(), `History before turn ${i} of completion ${one.trajectory}`)];
  }

  function talk(one) {
    const made = one.turns.flatMap((turn, i) => [
      ...rewritten(one, turn, i),
      element("p", { class: "turn soft" }, element("b", {}, `turn ${i}`), ` reward ${number(turn.reward, 2)} · version ${turn.versions.join(", ")} · ${turn.finish_reason}`),
      render(partOf(one, turn), colouring(), `Turn ${i} of completion ${one.trajectory}`), ...called(turn), ...shown(turn.shown)]);
    return one.limit ? [...made, element("p", { class: "turn warn" }, `ended by environment.limits.${one.limit}`)] : made;
  }

  function question() {
    const lines = group.messages.flatMap((message) => [element("dt", {}, visible(message.role)), element("dd", {}, visible(message.content))]);
    const pictures = group.images.map((facts, i) => picture(facts, group.ticket_id, i, group.images.length));
    return element("div", { class: "question" }, pictures.length ? element("div", { class: "pictures" }, ...pictures) : null,
      element("dl", { class: "messages" }, ...lines, ...(group.opening.length ? [element("dt", {}, "opening"), element("dd", {}, ...shown(group.opening))] : []), element("dt", {}, "answer"), element("dd", { class: "answer" }, visible(group.answer) || "–")));
  }

  function completion(one) {
    const facts = [];
    if (one.advantage !== null) facts.push(`advantage ${number(one.advantage, 2)}`);
    facts.push(`${one.length.toLocaleString("en")} tokens`, `staleness ${one.staleness}`, `Δ max ${number(one.logprob_diff_max, 3)}`);
    const style = one.status === "truncated" ? "warn" : "bad";
    const card = element("article", { class: "completion", "aria-label": `Completion ${one.trajectory}`, "data-trajectory": one.trajectory },
      element("header", {}, element("span", { class: "name" }, `${group.ticket_id}.${one.trajectory}`),
        element("span", { class: `score ${rewardClass(one)}` }, `reward ${number(one.reward, 2)}`),
        element("span", { class: "parts" }, ...Object.entries(one.rewards).map(([name, value]) => element("span", {}, `${visible(name)} ${number(value, 2)}`))),
        one.origin ? element("span", { class: "chip" }, one.origin) : null,
        element("span", { class: one.status === "finished" ? "soft" : `chip ${style}` }, one.status.replace("_", " ")),
        element("span", { class: "facts" }, ...facts.map((fact) => element("span", {}, fact)))));
    if (one.error) card.append(element("p", { class: "problem" }, visible(one.error)));
    if (!one.tokens.length) card.append(element("p", { class: "nothing" }, one.length ? "its tokens are no longer kept" : "(empty)"));
    else card.append(...(one.turns.length ? talk(one) : [render(one, colouring(), `Completion ${one.trajectory}`)]));
    return card;
  }

  function colourBar() {
    const now = colourings.find((one) => one.name === colouring());
    const titles = { diff: "Difference", version: "Version", mask: "Mask", logprob: "Probability" };
    const choices = colourings.map((one) => element("label", { title: one.title }, element("input", { type: "radio", name: "colour",
      value: one.name, checked: one.name === now.name }), element("span", {}, titles[one.name])));
    return element("div", { class: "bar" }, element("h3", {}, `${group.trajectories.length} completions`),
      element("span", { class: "switch", role: "radiogroup", "aria-label": "Colour the tokens by" }, ...choices), legend(now.name, now.legend));
  }

  // A bar for each completion, up from zero or down from it; choosing one leads to it.
  function rewardBars() {
    const rewards = group.trajectories.map((one) => one.reward ?? 0);
    const high = Math.max(0, ...rewards), low = Math.min(0, ...rewards), span = high - low || 1;
    const svg = (name, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      return made;
    };
    const picture = svg("svg", { width: 9 * rewards.length + 1, height: 26, class: "bars", role: "img",
      "aria-label": `Rewards ${group.trajectories.map((one) => number(one.reward, 2)).join(", ")}` });
    const zero = 1 + 24 * (high / span);
    rewards.forEach((reward, i) => {
      const one = group.trajectories[i], size = Math.max(1, 24 * Math.abs(reward) / span);
      const bar = svg("rect", { x: 9 * i + 1, width: 7, y: reward > 0 ? zero - size : zero, height: size, rx: 1,
        class: rewardClass(one) || "soft" });
      const column = svg("rect", { x: 9 * i, width: 9, y: 0, height: 26, class: "place" });
      column.append(svg("title", {}));
      column.firstChild.textContent = `${group.ticket_id}.${one.trajectory}: reward ${number(one.reward, 2)}`;
      column.addEventListener("click", () => choose(`${group.ticket_id}.${one.trajectory}`));
      picture.append(bar, column);
    });
    return picture;
  }

  // `whenChosen` is told the name of a completion that is asked for.
  function draw(shown, known, whenChosen) {
    [group, colourings, choose] = [shown, known, whenChosen];
    const rewards = group.trajectories.map((one) => one.reward).filter((reward) => reward !== null);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    place().replaceChildren(
      element("div", { class: "head" }, element("h2", {}, `Ticket ${group.ticket_id}`),
        element("span", {}, `step ${group.step}`),
        element("span", { class: "soft" }, visible(group.row_id)),
        group.server_id ? element("span", { class: "soft" }, `by ${visible(group.server_id)}`) : null,
        group.quantization ? element("span", { class: "soft" }, `with ${visible(group.quantization)} weights`) : null,
        rewards.length ? element("span", { class: "rewards" }, element("span", { class: "soft" }, `mean reward ${number(mean, 3)}`), rewardBars()) : null),
      question(), ...(group.problem ? [element("p", { class: "problem-line" }, visible(group.problem))] : []),
      colourBar(), ...group.trajectories.map(completion));
    place().scrollTop = 0;
  }

  function say(text) {
    group = null;
    place().replaceChildren(element("p", { class: "empty" }, text));
  }

  function mark(trajectory) {
    for (const card of place().querySelectorAll(".completion")) card.classList.toggle("chosen", Number(card.dataset.trajectory) === trajectory);
    if (trajectory) place().querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
    else place().scrollTop = 0;
  }

  // As the address says.
  function repaint() {
    if (group === null) return;
    const had = document.activeElement?.name === "colour";
    place().querySelector(".bar").replaceWith(colourBar());
    if (had) place().querySelector("input[name=colour]:checked").focus();
    for (const box of place().querySelectorAll(".tokens")) box.dataset.colour = colouring();
  }

  return { draw, say, mark, repaint, rewardClass, ticket: () => (group === null ? null : String(group.ticket_id)) };
})();
