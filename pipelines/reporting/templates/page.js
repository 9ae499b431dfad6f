"use strict";
// Tables with class "sort": a click on a column's head sorts by the cells' data-v, or by their text.
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(h => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = row => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].map((row, at) => ({row, at, v: value(row)}));
      const numeric = rows.every(({v}) => v === "" || !Number.isNaN(Number(v)));
      rows.sort((a, b) => {
        if (a.v === "" || b.v === "") return (a.v === "") - (b.v === "") || a.at - b.at; // what is not there comes last
        const order = numeric ? Number(a.v) - Number(b.v) : a.v.localeCompare(b.v, "en", {numeric: true});
        return (down ? -order : order) || a.at - b.at;
      });
      table.tBodies[0].append(...rows.map(({row}) => row));
    });
  });
}
// A search field narrows the table that it names to the rows that hold all of its words.
for (const field of document.querySelectorAll("input[data-table]")) {
  const table = document.getElementById(field.dataset.table);
  const count = document.getElementById(field.dataset.table + "-count");
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map(row => row.textContent.toLowerCase());
  const narrow = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every(word => texts[i].includes(word));
      shown += !row.hidden;
    });
    count.textContent = `${shown} of ${rows.length}`;
  };
  field.addEventListener("input", narrow);
  narrow();
}
// A figure opens in full size; its PNG is the picture on the page.
const dialog = document.querySelector("dialog");
for (const image of document.querySelectorAll("figure img")) {
  image.addEventListener("click", () => {
    dialog.replaceChildren(Object.assign(new Image(), {src: image.src, alt: image.alt}));
    dialog.showModal();
  });
  const link = image.closest("figure").querySelector("a.png");
  if (link) link.href = image.src;
}
dialog.addEventListener("click", () => dialog.close());
