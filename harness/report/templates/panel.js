// The panel of a comparison: a place pointed at in either of its figures, or a hook chosen in its table, is read out
// below them, and a hook opens into its gates, where they were kept, and its rows.
class Panel {
  constructor(panel) {
    [this.readout, this.depth, this.picture] = [".readout", "svg.depth", "svg.heat"].map((s) => panel.querySelector(s));
    this.gates = [...panel.querySelectorAll("template[data-gates]")];
    this.tables = [...panel.querySelectorAll("table.hooks")];
    this.rows = [...this.tables.at(-1).tBodies[0].rows];
    this.hooks = this.rows.map((row) => row.dataset.hook);
    this.heat = this.picture && new Heat(this.picture);
    if (this.depth) {
      this.box = this.depth.dataset.box.split(" ").map(Number);
      this.line = draw(this.depth, "path", { class: "cursor", visibility: "hidden" });
    }
    this.tables.forEach((table) => this.addButtons(table));
    this.follow();
  }
  addButtons(table) {
    for (const row of table.tBodies[0].rows) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = row.cells[0].textContent;
      button.setAttribute("aria-expanded", "false");
      button.title = "Show this hook's rows";
      row.cells[0].replaceChildren(button);
    }
    table.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-hook]");
      if (row && event.target.closest("button")) this.toggle(row.dataset.hook);
    });
  }
  follow() {
    const { hooks, heat, box } = this;
    steer(this.depth, [hooks.length, 1], (x) => this.mark(hooks[x]), (x) => this.toggle(hooks[x]),
      (px) => [Math.floor(((px - box[0]) / (box[1] - box[0])) * hooks.length), 0]);
    if (!heat) return;
    const hookAt = (y) => hooks.find((hook) => heat.lineOf(hook) === y) ?? heat.names[y];
    steer(this.picture, [heat.columns, heat.lines.length], (x, y) => this.mark(hookAt(y), x), (x, y) => this.toggle(hookAt(y)),
      (px, py) => [Math.floor(((px - LEFT) / (RIGHT - LEFT)) * heat.columns),
        Math.floor(((py - TOP) / heat.height) * heat.lines.length)]);
  }
  lineOf(hook) { return this.heat ? this.heat.lineOf(hook) : -1; }
  // The row of a hook in the table that is shown: a long one has a short one before it, around the first failure.
  rowOf(hook) {
    return this.tables.map((table) => [...table.tBodies[0].rows].find((row) => row.dataset.hook === hook))
      .find((row) => row && row.checkVisibility());
  }
  mark(hook, column) {
    const index = this.hooks.indexOf(hook);
    if (this.line && index >= 0) {
      const x = this.box[0] + ((index + 0.5) / this.hooks.length) * (this.box[1] - this.box[0]);
      this.line.setAttribute("d", `M${x} ${this.box[2]}V${this.box[3]}`);
      this.line.setAttribute("visibility", "visible");
    }
    const at = this.lineOf(hook);
    if (at >= 0) this.heat.show(at, column);
    this.readout.textContent = column === undefined || at < 0 ? this.figuresOf(hook)
      : `${this.heat.names[at]}, ${this.heat.place(column)}: ${inWords(this.heat.lines[at][column])}`;
  }
  figuresOf(hook) {
    const row = this.rows[this.hooks.indexOf(hook)];
    if (!row) return hook;
    const table = this.tables.at(-1);
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const told = [...row.cells].map((cell, i) => `${heads[i]} ${cell.textContent.trim()}`);
    return `${hook}: ${told.slice(1, table.classList.contains("multi") ? 8 : 7).join(", ")}`;
  }
  toggle(hook) {
    this.mark(hook);
    const row = this.rowOf(hook);
    if (!row) return;
    const wasOpen = row.nextElementSibling?.classList.contains("rows");
    row.querySelector("button").setAttribute("aria-expanded", String(!wasOpen));
    if (wasOpen) {
      row.nextElementSibling.remove();
      return;
    }
    const more = document.createElement("tr");
    more.className = "rows";
    const cell = more.insertCell();
    cell.colSpan = row.cells.length;
    this.tell(hook, cell);
    row.after(more);
    more.scrollIntoView({ block: "nearest" });
  }
  tell(hook, cell) {
    const gates = this.gates.find((one) => one.dataset.gates === hook);
    if (gates) cell.append(gates.content.cloneNode(true));
    const at = this.lineOf(hook);
    if (at >= 0) {
      cell.append(this.heat.strip(at));
      const list = document.createElement("p");
      list.className = "note";
      const { names } = this.heat;
      list.textContent = `Worst rows${names[at] === hook ? "" : ` of block ${names[at]}`}, request:position, by the bound of `
        + "the worst-row gate (each row is judged by its own): "
        + this.heat.worst(at).map(([column, code]) => `${this.heat.place(column)}, ${inWords(code)}`).join("; ");
      cell.append(list);
    }
    if (!cell.childNodes.length) cell.textContent = "No errors by row were recorded for this hook.";
  }
}
const preparePanel = (panel) => {
  if (panel.dataset.ready) return;
  panel.dataset.ready = "yes";
  new Panel(panel);
};

// Pointer and arrow keys over a figure of cells: `mark` where it is, `choose` on a click or Enter.
const steer = (svg, [columns, lines], mark, choose, cellAt) => {
  if (!svg) return;
  let [x, y] = [0, 0];
  svg.tabIndex = 0;
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")}. Arrow keys move, Enter opens the hook.`);
  const at = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const [column, line] = cellAt(point.x, point.y);
    return column >= 0 && line >= 0 && column < columns && line < lines ? [column, line] : null;
  };
  svg.addEventListener("pointermove", (event) => { const cell = at(event); if (cell) { [x, y] = cell; mark(x, y); } });
  svg.addEventListener("click", (event) => { const cell = at(event); if (cell) choose(...cell); });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step) {
      x = Math.min(Math.max(x + step[0], 0), columns - 1);
      y = Math.min(Math.max(y + step[1], 0), lines - 1);
      mark(x, y);
    } else if (event.key === "Enter") {
      choose(x, y);
    } else {
      return;
    }
    event.preventDefault();
  });
};
