// The page of `asyncrl inspect`. Its address says all that is shown: filters, page, sample and colouring.
(() => {
  "use strict";
  const { element, visible, number } = Tokens;
  const { words, pageNumber, chosen, go, fetchJson } = Address;
  const FILTERS = ["step", "reward", "status", "staleness", "prompt", "end", "tool", "error", "order"];
  const TYPED = ["step", "reward", "staleness", "prompt", "end", "tool", "error"];
  const PAGE_ROWS = 50;
  const POLL_MS = 5000;
  const byId = (id) => document.getElementById(id);
  const form = byId("filters");
  let run = null, found = { total: 0, offset: 0, rows: [] }, asked = 0, listedOf = 0, turning = false;

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
    for (const name of TYPED) form.elements[name].value = given.get(name) ?? "";
    form.elements.order.value = given.get("order") ?? run.orders[0];
    const statuses = (given.get("status") ?? "").split(",");
    for (const box of byId("statuses").querySelectorAll("input")) box.checked = statuses.includes(box.value);
  }

  function readFilters() {
    const changes = { page: null, sample: null };
    for (const name of TYPED) changes[name] = form.elements[name].value.trim();
    changes.order = form.elements.order.value === run.orders[0] ? null : form.elements.order.value;
    changes.status = [...byId("statuses").querySelectorAll("input:checked")].map((box) => box.value).join(",");
    go(changes, true);
    showList();
  }

  // --- the list ---

  const nameOf = (row) => `${row.ticket_id}.${row.trajectory}`;

  function listRow(row) {
    const about = row.origin ? [element("span", { class: "chip" }, row.origin)] : [];
    if (row.status !== "finished") about.push(element("span", { class: row.status === "truncated" ? "warn" : "bad" }, row.status.replace("_", " ")));
    about.push(`${row.length.toLocaleString("en")} tokens`);
    if (row.staleness) about.push(`${row.staleness} stale`);
    if (row.logprob_diff_max !== null) about.push(element("span", { class: row.logprob_diff_max > 0.5 ? "warn" : "" }, `Δ ${number(row.logprob_diff_max, 3)}`));
    const wrote = row.error || row.completion;
    return element("li", {}, element("a", { href: Address.with({ sample: nameOf(row) }), "data-sample": nameOf(row) },
      element("span", { class: `reward ${Group.rewardClass(row)}` }, number(row.reward, 2)),
      element("span", { class: "text", title: visible(row.prompt, false) }, wrote ? visible(wrote, false) : visible(row.prompt, false)),
      element("span", { class: "soft" }, String(row.step)),
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
      found = { total: 0, offset: 0, rows: [] };
    }
    byId("list").replaceChildren(...found.rows.map(listRow));
    byId("list").scrollTop = 0;
    const notice = byId("notice");
    notice.textContent = problem ? problem.message : found.rows.length ? "" : "No sample fits these filters.";
    notice.hidden = notice.textContent === "";
    notice.className = problem ? "bad" : "";
    for (const name of ["step", "reward", "staleness", "end", "error"]) {
      form.elements[name].setAttribute("aria-invalid", String(problem !== null && (problem.message.startsWith(name) || problem.message.startsWith(`there is no ${name} `))));
    }
    const last = found.offset + found.rows.length;
    byId("range").textContent = found.rows.length
      ? `${(found.offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${found.total.toLocaleString("en")}` : "";
    byId("previous").disabled = pageNumber() === 1;
    byId("next").disabled = last >= found.total;
    if (chosen() === null && found.rows.length) go({ sample: nameOf(found.rows[0]) }, true);
    markRow("center");
    showGroup(); // nobody waits for it: the next key is for the list
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
    if (turning || target < 1 || (pages > 0 && byId("next").disabled)) return;
    turning = true;
    go({ page: target === 1 ? null : target, sample: null });
    await showList();
    if (edge === "last" && found.rows.length) choose(nameOf(found.rows[found.rows.length - 1]), true);
    turning = false;
  }

  function choose(sample, replace = false) {
    go({ sample }, replace);
    markRow();
    showGroup();
  }

  function move(by) {
    const rows = found.rows.map(nameOf);
    const now = chosen();
    const at = rows.findIndex((name) => (now?.trajectory === null ? name.split(".")[0] === now.ticket : name === words().get("sample")));
    const next = at === -1 ? 0 : at + by;
    if (next < 0) turn(-1, "last");
    else if (next >= rows.length) turn(1);
    else choose(rows[next], true);
  }

  async function showGroup() {
    const now = chosen();
    if (now === null) return Group.say("No sample is chosen.");
    if (Group.ticket() !== now.ticket) {
      let answer;
      try {
        answer = await fetchJson(`/api/sample/${encodeURIComponent(now.ticket)}`);
      } catch (problem) {
        return Group.say(problem.message);
      }
      if (chosen()?.ticket !== now.ticket) return;
      Group.draw(answer, run.colourings, choose);
    } else Group.repaint();
    Group.mark(chosen().trajectory);
  }

  function recolour(name) {
    go({ colour: name }, true);
    Group.repaint();
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
