// The list of cases: rows are taken from the page as it came, then narrowed, sorted and shown a few hundred at a time.
const PAGE = 200;
const form = document.querySelector("form.tools");
const table = document.querySelector("table.cases");
const body = table.tBodies[0];
const more = document.querySelector(".more button");
const counted = form.querySelector("output");
const COLUMNS = ["outcome", "title", "suite", "model", "dtype", "mode", "ranks", "ratio", "time"];
const CHOSEN = ["outcome", "suite", "model", "dtype", "mode", "ranks"];
const cases = [...body.rows].map((row, order) => {
  const one = { row, order, link: row.cells[1].querySelector("a") };
  COLUMNS.forEach((name, i) => { one[name] = row.cells[i].textContent.trim(); });
  one.outcome = row.className;
  one.text = `${row.textContent} ${row.dataset.check} ${row.dataset.id}`.toLowerCase();
  for (const [name, i] of [["ratio", 7], ["time", 8]]) {
    const value = row.cells[i].dataset.v;
    one[name] = value === undefined ? -1 : value === "nan" ? Infinity : value === "inf" ? Number.MAX_VALUE : Number(value);
  }
  one.anchor = decodeURIComponent(one.link.hash.slice(1));
  if (row.dataset.body) one.link.setAttribute("aria-expanded", "false");
  return one;
});
const byAnchor = new Map(cases.filter((one) => one.row.dataset.body).map((one) => [one.anchor, one]));
let sorting = "";
let limit = PAGE;
let chosen = [];
let pinned = null;

const wanted = () => {
  const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
  const exact = CHOSEN.map((name) => [name, form.elements[name].value]).filter(([, value]) => value);
  return (one) => exact.every(([name, value]) => one[name] === value) && words.every((word) => one.text.includes(word));
};
const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
const show = () => {
  chosen = cases.filter(wanted());
  const key = sorting.replace("-", "");
  if (key) {
    const sign = sorting.startsWith("-") ? -1 : 1;
    chosen.sort((a, b) => sign * compare(a[key], b[key]) || a.order - b.order);
  }
  // A case that was asked for by its address and lies further down stands first.
  const first = chosen.slice(0, limit);
  if (pinned && !first.includes(pinned)) first.unshift(pinned);
  const rows = first.flatMap((one) => (one.opened ? [one.row, one.opened] : [one.row]));
  body.replaceChildren(...rows);
  const left = chosen.length - Math.min(limit, chosen.length);
  more.hidden = !left;
  more.textContent = `Show ${Math.min(left, PAGE)} more of ${left.toLocaleString("en")}`;
  const all = `${cases.length.toLocaleString("en")} ${cases.length === 1 ? "case" : "cases"}`;
  counted.textContent = chosen.length === cases.length ? all
    : chosen.length ? `${chosen.length.toLocaleString("en")} of ${all}` : "no case is like that";
  for (const head of table.tHead.rows[0].cells) {
    if (head.dataset.key === key) head.setAttribute("aria-sort", sorting.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
};
const state = () => {
  const found = new URLSearchParams();
  for (const name of ["q", ...CHOSEN]) if (form.elements[name].value) found.set(name, form.elements[name].value);
  if (sorting) found.set("sort", sorting);
  return found;
};
// The address is replaced, not added to: Back leaves the page instead of undoing letters of a search.
const keepAddress = (anchor = "") => {
  const found = state();
  if (anchor && found.size) found.set("case", anchor);
  const hash = found.size ? `#${found}` : anchor ? `#${encodeURIComponent(anchor)}` : "#cases";
  try { history.replaceState(null, "", hash); } catch { /* some viewers allow no history */ }
};
const narrow = (found) => {
  form.elements.q.value = found.get("q") ?? "";
  for (const name of CHOSEN) {
    const select = form.elements[name];
    select.value = found.get(name) ?? "";
    if (select.selectedIndex < 0) select.value = "";
  }
  const sort = found.get("sort") ?? "";
  sorting = COLUMNS.includes(sort.replace("-", "")) ? sort : "";
  limit = PAGE;
  pinned = null;
  show();
};
const openCase = async (one) => {
  if (!one.opened) {
    const row = document.createElement("tr");
    row.className = "opened";
    const cell = row.insertCell();
    cell.colSpan = COLUMNS.length;
    const inside = document.createElement("div");
    inside.className = "body";
    cell.append(inside);
    one.opened = row;
    await fill(inside, one.row.dataset.body);
  }
  one.link.setAttribute("aria-expanded", "true");
  if (one.row.isConnected) one.row.after(one.opened);
};
const closeCase = (one) => {
  one.opened.remove();
  one.opened = null;
  one.link.setAttribute("aria-expanded", "false");
};
// Brings a case into the list whatever it is narrowed to, opens it and goes there.
const reveal = async (one) => {
  if (!chosen.includes(one)) {
    narrow(new URLSearchParams());
    keepAddress(one.anchor);
    counted.textContent += ", all shown again for the case that was asked for";
  }
  if (!one.row.isConnected) {
    pinned = one;
    show();
  }
  await openCase(one);
  document.querySelectorAll("tr.target").forEach((row) => row.classList.remove("target"));
  one.row.classList.add("target");
  one.row.scrollIntoView({ block: "start" });
  one.link.focus({ preventScroll: true });
};

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => { limit = PAGE; pinned = null; show(); keepAddress(); });
form.addEventListener("reset", (event) => { event.preventDefault(); narrow(new URLSearchParams()); keepAddress(); });
more.addEventListener("click", () => {
  const next = chosen[limit];
  limit += PAGE;
  show();
  next?.link.focus();
});
for (const head of table.tHead.rows[0].cells) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const { key } = head.dataset;
    // Figures are asked for largest first, names from A.
    const [first, second] = ["ratio", "time"].includes(key) ? [`-${key}`, key] : [key, `-${key}`];
    sorting = sorting === first ? second : sorting === second ? "" : first;
    show();
    keepAddress();
  });
}
body.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-body]");
  if (!row || event.ctrlKey || event.metaKey || event.shiftKey || String(getSelection())) return;
  event.preventDefault();
  const one = byAnchor.get(row.id);
  if (one.opened) closeCase(one);
  else openCase(one);
  keepAddress(one.opened ? one.anchor : "");
});
