// Sort the tables by a click on a head, and filter the candidates in them.
"use strict";

// Ascending, then descending, then the original order. Rows without a number are last either way.
function sortable(table) {
  const bodies = [...table.tBodies].filter((body) => !body.classList.contains("dense"));
  const homes = bodies.flatMap((body) => [...body.rows].map((row) => [row, body]));
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.ariaSort];
      for (const other of heads) other.ariaSort = null;
      if (next === null) return homes.forEach(([row, body]) => body.append(row));
      head.ariaSort = next ?? "ascending";
      bodies[0].append(...sorted(homes.map(([row]) => row), column, next ? -1 : 1));
    });
  });
}

function sorted(rows, column, sign) {
  const numeric = rows.some((row) => "order" in row.cells[column].dataset);
  const key = ({ dataset, textContent }) => (numeric ? Number(dataset.order ?? sign * Infinity) : textContent);
  return rows
    .map((row) => [key(row.cells[column]), row])
    .sort(([first], [second]) => (first === second ? 0 : first < second ? -sign : sign))
    .map(([, row]) => row);
}

document.querySelectorAll(".numbers").forEach(sortable);
const filter = document.querySelector(".filter");
filter.hidden = false;
filter.addEventListener("submit", (event) => event.preventDefault());
filter.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll("[data-candidate]")) {
    row.hidden = !words.every((word) => row.dataset.candidate.toLowerCase().includes(word));
  }
});
