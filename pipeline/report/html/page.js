"use strict";
// Sorts a table by the column whose name is clicked: numbers by value, unknown ones last; a second click reverses the order.
const keyOf = (row, place) => {
  const cell = row.cells[place];
  return cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
};
const compare = (a, b, isNumber, turn) => {
  if (a === "" || b === "") return (a === "") - (b === "");
  return turn * (isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
};
const sortBy = (table, head) => {
  const place = head.cellIndex, turn = head.ariaSort === "ascending" ? -1 : 1;
  const body = table.tBodies[0], isNumber = head.classList.contains("n");
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", turn > 0 ? "ascending" : "descending");
  const rows = [...body.rows].map((row) => [keyOf(row, place), row]);
  rows.sort(([a], [b]) => compare(a, b, isNumber, turn));
  body.append(...rows.map(([, row]) => row));
};
for (const table of document.querySelectorAll("table.sorts"))
  for (const head of table.tHead.rows[0].cells)
    head.querySelector("button").addEventListener("click", () => sortBy(table, head));

// The age of the report, by the reader's clock.
const made = document.querySelector("time.made"), age = document.querySelector(".age");
const showAge = () => {
  const seconds = Math.max(0, Date.now() / 1000 - Number(made.dataset.at));
  const [count, unit] = seconds < 90 ? [seconds, "s"] : seconds < 5400 ? [seconds / 60, "min"]
    : seconds < 129600 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
  age.textContent = `, ${Math.round(count)} ${unit} ago`;
};
showAge();
setInterval(showAge, 10000);
