"use strict";
const tip = document.getElementById("tip");
const say = (event, words) => {
  tip.textContent = words;
  tip.hidden = !words;
  const beyond = event.clientX + 16 + tip.offsetWidth > innerWidth;
  tip.style.left = `${event.clientX + (beyond ? -tip.offsetWidth - 12 : 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
};
const hush = () => { tip.hidden = true; };
const shown = (y) => (y === null ? "not a number" : Math.abs(y) >= 1000 ? y.toLocaleString("en") : String(y));
const nearest = (values, x) => {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle; else high = middle;
  }
  return x - values[low] <= values[high] - x ? low : high;
};
const unitsAt = (svg, event) => {
  const box = svg.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
};

// Curves: the cursor stands at the same step in all of them.
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const data = JSON.parse(figure.dataset.chart);
  for (const series of data.s) series.xs = series.p.map((point) => point[0]);
  const svg = figure.querySelector("svg");
  return { data, svg, cursor: svg.querySelector(".cursor") };
});
const place = (chart, x) => {
  const [low, high] = chart.data.x;
  const inside = x >= low && x <= high;
  chart.cursor.style.visibility = inside ? "visible" : "hidden";
  if (!inside) return;
  const at = chart.data.l + (x - low) / (high - low || 1) * chart.data.w;
  chart.cursor.setAttribute("x1", at);
  chart.cursor.setAttribute("x2", at);
};
for (const chart of charts) {
  chart.svg.addEventListener("pointermove", (event) => {
    const { data } = chart, [low, high] = data.x;
    const wanted = low + (unitsAt(chart.svg, event) - data.l) / data.w * (high - low);
    const longest = data.s.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    const x = longest.xs[nearest(longest.xs, wanted)];
    const lines = data.s.map((series) => {
      const [at, y] = series.p[nearest(series.xs, x)];
      const where = at === x ? "" : `  (${data.n} ${at})`;
      return `${series.n}  ${shown(y)}${where}`;
    });
    say(event, [`${data.n} ${shown(x)}`, ...lines].join("\n"));
    for (const other of charts) if (other.data.n === data.n) place(other, x);
  });
  chart.svg.addEventListener("pointerleave", () => {
    hush();
    for (const other of charts) other.cursor.style.visibility = "hidden";
  });
}

// Timeline of the whole run: shares of a slice, of the lane under the pointer.
for (const svg of document.querySelectorAll("svg.overview")) {
  const data = JSON.parse(svg.dataset.slices), cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const i = nearest(data.x, unitsAt(svg, event));
    const box = svg.getBoundingClientRect();
    const y = (event.clientY - box.top) / box.height * svg.viewBox.baseVal.height;
    const lane = data.l[Math.max(0, Math.min(data.l.length - 1, Math.floor(y / 40)))];
    const parts = Object.entries(lane.s).filter(([, values]) => values[i] >= 0.005)
      .map(([what, values]) => `${what}  ${Math.round(values[i] * 100)} %`);
    const step = data.step[i] === null ? "" : `, step ${data.step[i]}`;
    say(event, [`${lane.n}${step}`, ...(parts.length ? parts : ["nothing"])].join("\n"));
    cursor.setAttribute("x1", data.x[i]);
    cursor.setAttribute("x2", data.x[i]);
    cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => { hush(); cursor.style.visibility = "hidden"; });
}
for (const svg of document.querySelectorAll("svg.detail")) {
  svg.addEventListener("pointermove", (event) => {
    const words = event.target.dataset.tip;
    if (words) say(event, words); else hush();
  });
  svg.addEventListener("pointerleave", hush);
}

// Samples by why they are shown, and conversations by how they ended and by one of their calls.
const buttons = [...document.querySelectorAll("[data-filter]")];
const choices = Object.fromEntries([...document.querySelectorAll("[data-chat]")].map((each) => [each.dataset.chat, each]));
const filterCards = () => {
  const label = document.querySelector("[data-filter].on")?.dataset.filter;
  const [end, tool, error] = ["end", "tool", "error"].map((name) => choices[name]?.value ?? "");
  const isChosen = ({ dataset }) => (!end || dataset.end === end) && ((!tool && !error) || JSON.parse(dataset.calls ?? "[]")
    .some(([name, kind]) => (!tool || name === tool) && (!error || (error === "*" ? kind : kind === error))));
  for (const card of document.querySelectorAll(".card")) {
    const completions = [...card.querySelectorAll(".completion")];
    for (const completion of completions) completion.hidden = !isChosen(completion);
    const isLabelled = !label || card.dataset.labels.split(" ").includes(label);
    card.hidden = !isLabelled || completions.every((completion) => completion.hidden);
    if (end || tool || error) for (const folded of card.querySelectorAll(".completions > details")) folded.open = true;
  }
};
for (const button of buttons) {
  button.addEventListener("click", () => {
    for (const other of buttons) other.classList.toggle("on", other === button);
    filterCards();
  });
}
for (const choice of Object.values(choices)) choice.addEventListener("change", filterCards);
