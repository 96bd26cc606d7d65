"use strict";
(() => {
  const form = document.getElementById("filters");
  const table = document.getElementById("table");
  const rows = table ? [...table.tBodies[0].rows] : [];
  const heads = table ? [...table.tHead.rows[0].cells] : [];

  // Filter: everything that names a facet and lacks the chosen value is put away.
  const apply = () => {
    const chosen = [...form.querySelectorAll("select")].filter((s) => s.value && s.name !== "sort");
    for (const item of document.querySelectorAll("tr[data-model], .card[data-model], .chart-box, .model, .machine")) {
      const away = chosen.some((s) => s.name in item.dataset && !item.dataset[s.name].split("|").includes(s.value));
      item.toggleAttribute("data-hidden", away);
    }
    const left = rows.filter((row) => !row.hasAttribute("data-hidden")).length;
    document.getElementById("shown").value = `${left} of ${rows.length} results`;
  };

  // Sort: once up, once down, then as the report had it.
  const value = (row, index) => row.cells[index].dataset.value ?? row.cells[index].textContent.trim();
  const order = (index, way) => {
    const numeric = index >= 0 && heads[index].dataset.sort === "number";
    const missing = (v) => numeric && Number(v) < 0;
    const compare = (a, b) => {
      if (index < 0) return a.dataset.order - b.dataset.order;
      const [x, y] = [value(a, index), value(b, index)];
      if (missing(x) !== missing(y)) return missing(x) ? 1 : -1;
      return way * (numeric ? x - y : x.localeCompare(y)) || a.dataset.order - b.dataset.order;
    };
    table.tBodies[0].append(...rows.sort(compare));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== index ? "none" : way > 0 ? "ascending" : "descending"));
  };
  heads.forEach((head, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const state = head.getAttribute("aria-sort");
      if (state === "descending") order(-1, 1);
      else order(index, state === "ascending" ? -1 : 1);
    });
    if (form) form.elements.sort.add(new Option(head.textContent.trim(), index));
  });

  if (form) {
    form.hidden = false;
    form.addEventListener("change", (event) => {
      if (event.target.name === "sort") order(event.target.value === "" ? -1 : Number(event.target.value), 1);
      apply();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => { if (table) order(-1, 1); apply(); }));
    apply();
  }

  // A link to a result opens it; printing opens everything.
  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", open);
  open();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((item) => { item.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((item) => { item.open = false; }));
})();
