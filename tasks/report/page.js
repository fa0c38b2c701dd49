// Sort and filter the tables, choose the cost on the plot's horizontal axis, open a candidate.
// Text from the study enters the page only as text (textContent), never as markup.
"use strict";

const { targets, models } = JSON.parse(document.getElementById("details").textContent);
const candidates = [...document.querySelectorAll("[data-candidate]")];

function element(name, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.append(...[content].flat());
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const pairs = (some) => some.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);

// ---- Sort: the better end first, then the other, then the original order. Rows of a fixed body stay on top.

const OTHER = { ascending: "descending", descending: "ascending" };

function sortable(table) {
  const bodies = [...table.tBodies].filter((body) => !body.classList.contains("fixed"));
  const homes = bodies.flatMap((body) => [...body.rows].map((row) => [row, body]));
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element("button", [...head.childNodes], { type: "button" });
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.dataset.first;
      const now = head.getAttribute("aria-sort");
      for (const other of heads) other.removeAttribute("aria-sort");
      if (now === OTHER[first]) {
        for (const [row, body] of homes) body.append(row);
        return;
      }
      const next = now ? OTHER[now] : first;
      head.setAttribute("aria-sort", next);
      bodies[0].append(...sorted(homes.map(([row]) => row), column, next === "ascending" ? 1 : -1));
    });
  });
}

// Sort by numbers where a column has them, with rows without a number last either way; otherwise by text.
function sorted(rows, column, sign) {
  const numeric = rows.some((row) => "order" in row.cells[column].dataset);
  const key = (row) => {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent;
    return "order" in cell.dataset ? Number(cell.dataset.order) : sign * Infinity;
  };
  return rows
    .map((row) => [key(row), row])
    .sort(([one], [other]) => (one === other ? 0 : one < other ? -sign : sign))
    .map(([, row]) => row);
}

// ---- Filter: the tables and the plot at once.

function filterable(form) {
  const apply = () => {
    const { name, recipe, keep } = form.elements;
    const words = name.value.toLowerCase().split(/\s+/);
    const shown = new Set();
    for (const one of candidates) {
      const { candidate, recipe: itsRecipe, keep: itsKeep } = one.dataset;
      const fits = words.every((word) => candidate.toLowerCase().includes(word));
      const wanted = fits && [itsRecipe, ""].includes(recipe.value) && [itsKeep, ""].includes(keep.value);
      one.toggleAttribute("hidden", !wanted);
      if (wanted) shown.add(candidate);
    }
    const all = new Set(candidates.map((one) => one.dataset.candidate)).size;
    form.querySelector("output").textContent = `${shown.size} of ${all} candidates`;
    trace();
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  form.reset(); // a browser may bring back what stood there before a reload
  apply();
}

// ---- The plot.

const marks = [...document.querySelectorAll(".mark")];
const axes = document.getElementById("across");
const tip = document.querySelector(".tip");
const axis = () => axes.querySelector(":checked").value;
const place = (mark) => models[mark.dataset.model].x[axis()];

function trace() {
  for (const line of document.querySelectorAll("[data-trace]")) {
    const shown = marks.filter((mark) => mark.dataset.recipe === line.dataset.trace && !mark.hasAttribute("hidden"));
    line.setAttribute("points", shown.map((mark) => `${place(mark)},${mark.dataset.y}`).join(" "));
  }
}

function move() {
  for (const ticks of document.querySelectorAll("[data-axis]")) {
    ticks.toggleAttribute("hidden", ticks.dataset.axis !== axis());
  }
  for (const mark of marks) mark.setAttribute("transform", `translate(${place(mark)} ${mark.dataset.y})`);
  trace();
}

let tipped; // the mark that the tip is about

function showTip(mark) {
  const { model } = mark.dataset;
  tip.replaceChildren(element("strong", model), element("dl", pairs(models[model].facts)));
  tip.hidden = false;
  tipped = mark;
  placeTip();
}

function placeTip() {
  if (tip.hidden) return;
  const point = tipped.querySelector(".shape").getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const below = point.bottom + 8;
  tip.style.left = `${Math.max(8, Math.min(point.left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below + box.height < innerHeight ? below : point.top - box.height - 8}px`;
}

function hideTip() {
  tip.hidden = true;
}

function explorable(mark) {
  const title = mark.querySelector("title");
  mark.setAttribute("aria-label", title.textContent);
  title.remove(); // the browser's own tip would stand beside this one
  mark.setAttribute("tabindex", "0");
  mark.setAttribute("role", mark.dataset.candidate ? "button" : "img");
  mark.addEventListener("pointerenter", () => showTip(mark));
  mark.addEventListener("focus", () => {
    if (mark.matches(":focus-visible")) showTip(mark); // not where a click left the focus
  });
  for (const event of ["pointerleave", "blur"]) mark.addEventListener(event, hideTip);
  if (!mark.dataset.candidate) return;
  mark.addEventListener("click", () => show(mark.dataset.candidate));
  mark.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      show(mark.dataset.candidate);
    }
  });
}

// ---- A candidate.

const dialog = document.getElementById("candidate");
const part = (name) => dialog.querySelector(`[data-part=${name}]`);

function show(name) {
  const model = models[name];
  document.getElementById("candidate-name").textContent = name;
  part("facts").replaceChildren(...pairs(model.facts));
  part("commands").replaceChildren(...pairs(model.commands.map(([what, line]) => [what, element("code", line)])));
  part("ranks").replaceChildren(rankTable(model));
  part("card").textContent = model.card;
  dialog.showModal();
  dialog.scrollTop = 0;
}

function rankTable({ ranks, rows, shares }) {
  const cells = targets.layers.map(() => targets.kinds.map(() => element("td")));
  targets.cells.forEach(([name, shape, layer, kind], position) => {
    const rank = ranks[position] === null ? "dense" : String(ranks[position]);
    const beside = rows[position] ? ` + ${rows[position]} rows` : "";
    const percent = `${(100 * shares[position]).toFixed(1)}\u00a0%`;
    const shade = element("span", "", { class: "shade" });
    shade.style.opacity = 0.3 * Math.min(shares[position], 1);
    const cell = cells[layer][kind];
    cell.append(shade, rank + beside, element("span", percent, { class: "below" }));
    cell.title = `${name}, ${shape}`;
  });
  const heads = ["layer", ...targets.kinds].map((kind) => element("th", kind, { scope: "col" }));
  const lines = cells.map((line, layer) => [element("th", targets.layers[layer], { scope: "row" }), ...line]);
  const body = lines.map((line) => element("tr", line));
  return element("table", [element("thead", element("tr", heads)), element("tbody", body)], { class: "ranks" });
}

for (const row of document.querySelectorAll("tr[data-candidate]")) {
  const head = row.cells[0];
  const button = element("button", [...head.childNodes], { type: "button" });
  head.append(button);
  button.addEventListener("click", () => show(row.dataset.candidate));
}
dialog.querySelector(".close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // beside it
});
document.querySelectorAll(".sortable").forEach(sortable);
marks.forEach(explorable);
addEventListener("scroll", placeTip, { capture: true, passive: true });
axes.addEventListener("change", move);
axes.hidden = false;
axes.querySelector("input").checked = true;
move();
filterable(document.getElementById("filter"));
