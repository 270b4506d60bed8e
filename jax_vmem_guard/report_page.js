"use strict";
(() => {
  const table = document.querySelector("table.kernels");
  if (!table) return;
  const kernels = [...table.querySelectorAll("tbody.kernel")];
  const status = document.getElementById("status");
  const search = document.getElementById("search");
  const trouble = document.getElementById("trouble");

  const show = () => {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const kernel of kernels) {
      const text = kernel.dataset.text;
      kernel.hidden = !words.every((word) => text.includes(word)) || (trouble.checked && kernel.dataset.verdict === "fits");
      shown += kernel.hidden ? 0 : 1;
    }
    status.textContent = `${shown} of ${kernels.length} rows shown`;
  };
  search.addEventListener("input", show);
  trouble.addEventListener("change", show);

  const headers = [...table.querySelectorAll("th[data-key]")];
  for (const header of headers) {
    header.querySelector("button").addEventListener("click", () => {
      const numeric = header.dataset.type === "number";
      const was = header.getAttribute("aria-sort");
      // The first press shows the largest numbers, or the names from A.
      const down = was ? was === "ascending" : numeric;
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = header.dataset.key;
      const compare = (a, b) => {
        const [x, y] = [a.dataset[key], b.dataset[key]];
        if (x === "" || y === "") return (x === "") - (y === "");  // unknown last, either way
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return down ? -order : order;
      };
      table.append(...[...kernels].sort(compare));
      status.textContent = `sorted by ${header.textContent.trim()}, ${down ? "descending" : "ascending"}`;
    });
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of opened) details.open = false; });
})();
