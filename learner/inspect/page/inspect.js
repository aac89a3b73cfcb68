// The page of `asyncrl inspect`. Its address says all that is shown: filters, page, sample and colouring.
(() => {
  "use strict";
  const { element, visible, number, render, legend } = Tokens;
  const FILTERS = ["step", "reward", "status", "staleness", "prompt", "order"];
  const PAGE_ROWS = 50;
  const POLL_MS = 5000;
  const SMALL_PIXELS = 160; // pictures below this width are enlarged, pixel by pixel
  const byId = (id) => document.getElementById(id);
  const form = byId("filters");
  let run = null, found = { total: 0, offset: 0, rows: [] }, group = null, asked = 0, listedOf = 0;

  const words = () => new URLSearchParams(location.search);
  const pageNumber = () => Math.max(1, Number.parseInt(words().get("page"), 10) || 1);
  const colouring = () => (Tokens.COLOURINGS.includes(words().get("colour")) ? words().get("colour") : "diff");
  const chosen = () => {
    const [ticket, trajectory] = (words().get("sample") ?? "").split(".");
    return ticket === "" ? null : { ticket, trajectory: trajectory === undefined ? null : Number(trajectory) };
  };
  const addressWith = (changes) => {
    const next = words();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") next.delete(name);
      else next.set(name, value);
    }
    return next.size ? `?${next}` : location.pathname;
  };
  const go = (changes, replace = false) => history[replace ? "replaceState" : "pushState"](null, "", addressWith(changes));

  async function fetchJson(path) {
    let answer;
    try {
      answer = await fetch(path, { signal: AbortSignal.timeout(30000) });
    } catch {
      throw new Error("asyncrl inspect does not answer: is it still running in its terminal?");
    }
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error ?? answer.statusText);
    return value;
  }

  // --- the run ---

  function showRun() {
    const facts = [element("b", {}, visible(run.path))];
    if (run.step !== null) facts.push(run.total_steps ? `step ${run.step} of ${run.total_steps}` : `step ${run.step}`);
    if (run.phase) facts.push(run.phase);
    facts.push(`${run.samples.toLocaleString("en")} samples`);
    byId("run").replaceChildren(...facts.flatMap((fact, i) => (i ? [" · ", fact] : [fact])));
    document.title = `${run.path.split("/").slice(-2).join("/")} – asyncrl inspect`;
  }

  // What is looked at stays where it is: new samples are announced, and shown when somebody asks.
  async function poll() {
    try {
      run = await fetchJson("/api/run");
      showRun();
      const more = run.samples - listedOf;
      byId("fresh").hidden = more === 0;
      byId("fresh").textContent = more > 0 ? `${more.toLocaleString("en")} new` : "changed";
    } catch (problem) {
      byId("run").textContent = problem.message;
    }
    setTimeout(poll, POLL_MS);
  }

  // --- filters ---

  function buildFilters() {
    form.elements.order.append(...run.orders.map((order) => element("option", { value: order }, order)));
    byId("statuses").append(...run.statuses.map((status) =>
      element("label", {}, element("input", { type: "checkbox", name: "status", value: status }), element("span", {}, status.replace("_", " ")))));
  }

  function fillFilters() {
    const given = words();
    for (const name of ["step", "reward", "staleness", "prompt"]) form.elements[name].value = given.get(name) ?? "";
    form.elements.order.value = given.get("order") ?? run.orders[0];
    const statuses = (given.get("status") ?? "").split(",");
    for (const box of byId("statuses").querySelectorAll("input")) box.checked = statuses.includes(box.value);
  }

  function readFilters() {
    const changes = { page: null, sample: null };
    for (const name of ["step", "reward", "staleness", "prompt"]) changes[name] = form.elements[name].value.trim();
    changes.order = form.elements.order.value === run.orders[0] ? null : form.elements.order.value;
    changes.status = [...byId("statuses").querySelectorAll("input:checked")].map((box) => box.value).join(",");
    go(changes, true);
    showList();
  }

  // --- the list ---

  // Green and red are what the learner makes of it: more likely, or less.
  const rewardClass = ({ reward, advantage }) => (reward === null ? "soft" : advantage > 0 ? "good" : advantage < 0 ? "bad" : "");
  const nameOf = (row) => `${row.ticket_id}.${row.trajectory}`;

  function listRow(row) {
    const about = [];
    if (row.status !== "finished") about.push(element("span", { class: row.status === "truncated" ? "warn" : "bad" }, row.status.replace("_", " ")));
    about.push(`${row.length.toLocaleString("en")} tokens`);
    if (row.staleness) about.push(`${row.staleness} stale`);
    if (row.logprob_diff_max !== null) about.push(element("span", { class: row.logprob_diff_max > 0.5 ? "warn" : "" }, `Δ ${number(row.logprob_diff_max, 3)}`));
    const wrote = row.error || row.completion;
    return element("li", {}, element("a", { href: addressWith({ sample: nameOf(row) }), "data-sample": nameOf(row) },
      element("span", { class: `reward ${rewardClass(row)}` }, number(row.reward, 2)),
      element("span", { class: "text", title: visible(row.prompt, false) }, wrote ? visible(wrote, false) : visible(row.prompt, false)),
      element("span", { class: "soft" }, row.step === null ? "waiting" : String(row.step)),
      element("span", { class: "about" }, ...about.map((fact) => (typeof fact === "string" ? element("span", {}, fact) : fact)),
        element("span", { class: "id" }, nameOf(row)))));
  }

  async function showList() {
    const request = ++asked;
    listedOf = run.samples;
    byId("fresh").hidden = true;
    const query = new URLSearchParams({ offset: (pageNumber() - 1) * PAGE_ROWS, limit: PAGE_ROWS });
    for (const name of FILTERS) if (words().get(name)) query.set(name, words().get(name));
    let problem = null;
    try {
      const answer = await fetchJson(`/api/samples?${query}`);
      if (request !== asked) return;
      found = answer;
    } catch (error) {
      if (request !== asked) return;
      problem = error;
      found = { total: 0, offset: 0, rows: [], notices: [] };
    }
    byId("list").replaceChildren(...found.rows.map(listRow));
    byId("list").scrollTop = 0;
    const notice = byId("notice");
    const told = problem ? [problem.message] : found.rows.length ? found.notices : [...found.notices, "No sample fits these filters."];
    notice.hidden = told.length === 0;
    notice.className = problem ? "bad" : "";
    notice.textContent = told.join(" ");
    for (const name of ["step", "reward", "staleness"]) {
      form.elements[name].setAttribute("aria-invalid", String(problem !== null && problem.message.startsWith(name)));
    }
    const last = found.offset + found.rows.length;
    byId("range").textContent = found.rows.length
      ? `${(found.offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${found.total.toLocaleString("en")}` : "";
    byId("previous").disabled = pageNumber() === 1;
    byId("next").disabled = last >= found.total;
    if (chosen() === null && found.rows.length) go({ sample: nameOf(found.rows[0]) }, true);
    markRow("center");
    await showGroup();
  }

  function markRow(block = "nearest") {
    const now = chosen();
    for (const link of byId("list").querySelectorAll("a")) {
      const here = now !== null && (now.trajectory === null ? link.dataset.sample.split(".")[0] === now.ticket : link.dataset.sample === `${now.ticket}.${now.trajectory}`);
      if (here) {
        link.setAttribute("aria-current", "true");
        link.scrollIntoView({ block });
      } else link.removeAttribute("aria-current");
    }
  }

  async function turn(pages, edge) {
    const target = pageNumber() + pages;
    if (target < 1 || (pages > 0 && byId("next").disabled)) return;
    go({ page: target === 1 ? null : target, sample: null });
    await showList();
    if (edge === "last" && found.rows.length) choose(nameOf(found.rows[found.rows.length - 1]));
  }

  function choose(sample) {
    go({ sample });
    markRow();
    showGroup();
  }

  function move(by) {
    const rows = found.rows.map(nameOf);
    const now = chosen();
    const at = rows.findIndex((name) => (now?.trajectory === null ? name.split(".")[0] === now.ticket : name === words().get("sample")));
    if (at + by < 0) turn(-1, "last");
    else if (at + by >= rows.length) turn(1);
    else choose(rows[at + by]);
  }

  // --- the group ---

  function picture(facts, ticket, i, count) {
    if (facts.problem) return element("figure", {}, element("figcaption", {}, `image ${i + 1}: ${visible(facts.problem)} (${facts.hash.slice(0, 12)}…)`));
    const source = `/image/${encodeURIComponent(facts.hash)}?ticket=${encodeURIComponent(ticket)}`;
    const scale = facts.width < SMALL_PIXELS ? Math.min(4, Math.floor(2 * SMALL_PIXELS / facts.width)) : 1;
    const image = (width, zoomed) => element("img", { src: source, width, class: scale > 1 || zoomed ? "pixels" : false,
      alt: `Image ${i + 1} of ${count}, ${facts.width} by ${facts.height} pixels` });
    const button = element("button", { type: "button", title: "Enlarge" }, image(facts.width * scale, false));
    button.addEventListener("click", () => {
      byId("picture").replaceChildren(image(facts.width * Math.max(1, Math.floor(0.9 * window.innerWidth / facts.width)), facts.width < 600));
      byId("picture").showModal();
    });
    const video = facts.frames ? `first of ${facts.frames} frames, ` : "";
    return element("figure", {}, button, element("figcaption", {},
      `${video}${facts.width} × ${facts.height} ${facts.format}, ${(facts.bytes / 1024).toFixed(1)} KiB, `,
      element("span", { title: facts.hash }, `${facts.hash.slice(0, 8)}…`)));
  }

  function question() {
    const lines = group.messages.flatMap((message) => [element("dt", {}, visible(message.role)), element("dd", {}, visible(message.content))]);
    const pictures = group.images.map((facts, i) => picture(facts, group.ticket_id, i, group.images.length));
    return element("div", { class: "question" }, pictures.length ? element("div", { class: "pictures" }, ...pictures) : null,
      element("dl", { class: "messages" }, ...lines, element("dt", {}, "answer"), element("dd", { class: "answer" }, visible(group.answer) || "–")));
  }

  function completion(one, isChosen) {
    const facts = [];
    if (one.advantage !== null) facts.push(`advantage ${number(one.advantage, 2)}`);
    facts.push(`${one.length.toLocaleString("en")} tokens`, `staleness ${one.staleness}`, `Δ max ${number(one.logprob_diff_max, 3)}`);
    const style = one.status === "truncated" ? "warn" : "bad";
    const card = element("article", { class: isChosen ? "completion chosen" : "completion", "aria-label": `Completion ${one.trajectory}`, "data-trajectory": one.trajectory },
      element("header", {}, element("span", { class: "name" }, `${group.ticket_id}.${one.trajectory}`),
        element("span", { class: `score ${rewardClass(one)}` }, `reward ${number(one.reward, 2)}`),
        element("span", { class: "parts" }, ...Object.entries(one.rewards).map(([name, value]) => element("span", {}, `${visible(name)} ${number(value, 2)}`))),
        element("span", { class: one.status === "finished" ? "soft" : `chip ${style}` }, one.status.replace("_", " ")),
        element("span", { class: "facts" }, ...facts.map((fact) => element("span", {}, fact)))));
    if (one.error) card.append(element("p", { class: "problem" }, visible(one.error)));
    card.append(one.tokens.length ? render(one, colouring(), `Completion ${one.trajectory}`)
      : element("p", { class: "nothing" }, one.length ? "its tokens are not kept any more" : "(empty)"));
    return card;
  }

  function colourBar() {
    const now = run.colourings.find((one) => one.name === colouring());
    const titles = { diff: "Difference", version: "Version", mask: "Mask", logprob: "Probability" };
    const choices = run.colourings.map((one) => element("label", { title: one.title }, element("input", { type: "radio", name: "colour",
      value: one.name, checked: one.name === now.name }), element("span", {}, titles[one.name])));
    return element("div", { class: "bar" }, element("h3", {}, `${group.trajectories.length} completions`),
      element("span", { class: "switch", role: "radiogroup", "aria-label": "Colour the tokens by" }, ...choices), legend(now.name, now.legend));
  }

  function recolour(name) {
    go({ colour: name === "diff" ? null : name }, true);
    if (group === null) return;
    const had = document.activeElement?.name === "colour";
    byId("group").querySelector(".bar").replaceWith(colourBar());
    if (had) byId("group").querySelector("input[name=colour]:checked").focus();
    for (const box of byId("group").querySelectorAll(".tokens")) box.dataset.colour = name;
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
      const place = svg("rect", { x: 9 * i, width: 9, y: 0, height: 26, class: "place" });
      place.append(svg("title", {}));
      place.firstChild.textContent = `${group.ticket_id}.${one.trajectory}: reward ${number(one.reward, 2)}`;
      place.addEventListener("click", () => choose(`${group.ticket_id}.${one.trajectory}`));
      picture.append(bar, place);
    });
    return picture;
  }

  function drawGroup(now) {
    const rewards = group.trajectories.map((one) => one.reward).filter((reward) => reward !== null);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    byId("group").replaceChildren(
      element("div", { class: "head" }, element("h2", {}, `Ticket ${group.ticket_id}`),
        element("span", {}, group.step === null ? "not trained on yet" : `step ${group.step}`),
        element("span", { class: "soft" }, visible(group.row_id)),
        group.server_id ? element("span", { class: "soft" }, `by ${visible(group.server_id)}`) : null,
        rewards.length ? element("span", { class: "rewards" }, element("span", { class: "soft" }, `mean reward ${number(mean, 3)}`), rewardBars()) : null),
      question(), ...(group.problem ? [element("p", { class: "problem-line" }, visible(group.problem))] : []),
      colourBar(), ...group.trajectories.map((one) => completion(one, one.trajectory === now.trajectory)));
  }

  async function showGroup() {
    const now = chosen();
    if (now === null) {
      group = null;
      byId("group").replaceChildren(element("p", { class: "empty" }, "No sample is chosen."));
      return;
    }
    const known = group !== null && String(group.ticket_id) === now.ticket;
    try {
      if (!known) {
        const answer = await fetchJson(`/api/sample/${encodeURIComponent(now.ticket)}`);
        if (chosen()?.ticket !== now.ticket) return;
        group = answer;
        drawGroup(now);
        byId("group").scrollTop = 0;
      } else {
        for (const card of byId("group").querySelectorAll(".completion")) card.classList.toggle("chosen", Number(card.dataset.trajectory) === now.trajectory);
      }
    } catch (problem) {
      group = null;
      byId("group").replaceChildren(element("p", { class: "empty" }, problem.message));
      return;
    }
    if (now.trajectory) byId("group").querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
    else if (known) byId("group").scrollTop = 0;
  }

  // --- what the user does ---

  let typing = 0;
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(readFilters, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); readFilters(); });
  byId("clear").addEventListener("click", () => {
    go(Object.fromEntries([...FILTERS, "page", "sample"].map((name) => [name, null])));
    fillFilters();
    showList();
  });
  byId("list").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    choose(link.dataset.sample);
  });
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  byId("group").addEventListener("change", (event) => { if (event.target.name === "colour") recolour(event.target.value); });
  byId("fresh").addEventListener("click", () => { go({ page: null, sample: null }, true); showList(); });
  byId("keys").addEventListener("click", () => byId("help").showModal());
  byId("picture").addEventListener("click", () => byId("picture").close());
  window.addEventListener("popstate", () => { fillFilters(); showList(); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.matches("input:not([type=checkbox], [type=radio]), select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = { j: () => move(1), k: () => move(-1), "]": () => turn(1), "[": () => turn(-1),
      "/": () => form.elements.prompt.focus(), "?": () => byId("help").showModal() }[event.key];
    const colour = Tokens.COLOURINGS[Number(event.key) - 1];
    if (!act && !colour) return;
    event.preventDefault();
    if (act) act();
    else recolour(colour);
  });

  (async () => {
    try {
      run = await fetchJson("/api/run");
    } catch (problem) {
      byId("run").textContent = problem.message;
      return;
    }
    showRun();
    buildFilters();
    fillFilters();
    await showList();
    setTimeout(poll, POLL_MS);
  })();
})();
