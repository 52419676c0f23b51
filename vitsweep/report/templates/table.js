"use strict";
(() => {
  const table = document.getElementById("cells");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const selects = [...document.querySelectorAll("#tools select")];
  const shown = document.getElementById("shown");

  // Numbers as numbers, empty cells last in both directions.
  function compare(column, direction) {
    return (a, b) => {
      const [x, y] = [a.cells[column].dataset.key, b.cells[column].dataset.key];
      if (x === "" || y === "") return (x === "") - (y === "");
      const difference = Number(x) - Number(y);
      return direction * (Number.isNaN(difference) ? x.localeCompare(y) : difference);
    };
  }

  function sort(header) {
    const headers = [...header.parentElement.cells];
    const ascending = header.ariaSort ? header.ariaSort === "descending" : !header.classList.contains("number");
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    rows.sort(compare(headers.indexOf(header), ascending ? 1 : -1));
    body.append(...rows);
  }

  function filter() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      const hit = wanted.every((word) => text.includes(word)) &&
        selects.every((s) => s.value === "" || row.cells[s.dataset.column].textContent === s.value);
      row.hidden = !hit;
      count += hit;
    });
    shown.textContent = `${count} of ${rows.length} cells`;
  }

  [...table.tHead.rows[0].cells].forEach((header) =>
    header.querySelector("button").addEventListener("click", () => sort(header)));
  search.addEventListener("input", filter);
  selects.forEach((select) => select.addEventListener("change", filter));
})();
