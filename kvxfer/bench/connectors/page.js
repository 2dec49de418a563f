"use strict";
// Sorts the table of rows by the column whose title was chosen; once more turns it round.
const table = document.getElementById("rows");
const body = table.tBodies[0];
const titles = [...table.tHead.rows[0].cells];

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.order === undefined ? cell.textContent : Number(cell.dataset.order);
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

titles.forEach((title, column) => {
  title.querySelector("button")?.addEventListener("click", () => {
    const turned = title.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    titles.forEach((other) => other.removeAttribute("aria-sort"));
    title.setAttribute("aria-sort", turned === 1 ? "ascending" : "descending");
    const rows = [...body.rows];
    rows.sort((a, b) => turned * compare(key(a, column), key(b, column)));
    body.append(...rows);
  });
});
