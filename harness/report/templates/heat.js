// Heat maps are drawn here from one character per cell; harness/report/heat.py says what each stands for.
const SVG = "http://www.w3.org/2000/svg";
const ALPHABET = ".0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz~";
const ONE = 31;
const [LEFT, RIGHT, TOP, WIDTH] = [58, 710, 4, 720];
const draw = (parent, name, attributes, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
// Colour: 0 none, 1 to 8 a quarter decade each up to the bound, 9 to 11 above it by 1, 3, 10, 12 not a number.
const colour = (code) => {
  if (code <= 0) return 0;
  if (code === ALPHABET.length - 1) return 12;
  if (code <= ONE) return Math.max(8 - Math.floor((ONE - code) / 2.5), 1);
  return code <= ONE + 5 ? 9 : code <= ONE + 10 ? 10 : 11;
};
const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const inWords = (code) => {
  if (code <= 0) return "no such row";
  if (code === ALPHABET.length - 1) return "not a number";
  if (code === 1) return "at most 0.001 of the bound";
  if (code === ALPHABET.length - 2) return "more than 1,000 times the bound";
  return `${short(10 ** ((code - ONE - 1) / 10))} to ${short(10 ** ((code - ONE) / 10))} of the bound`;
};
const blockOf = (hook) => (/^blocks\.(\d+)\./.exec(hook) || [])[1];

class Heat {
  constructor(svg) {
    this.svg = svg;
    this.lines = svg.dataset.cells.split(" ").map((line) => [...line].map((c) => ALPHABET.indexOf(c)));
    this.names = svg.dataset.names.split(" ");
    this.starts = svg.dataset.starts.split(" ").map(Number);
    this.per = Number(svg.dataset.per);
    this.columns = this.lines[0].length;
    this.height = Math.min(Math.max(this.lines.length * 6, 12), 280);
    this.paint();
  }
  x(column) { return LEFT + (column / this.columns) * (RIGHT - LEFT); }
  y(line) { return TOP + (line / this.lines.length) * this.height; }
  // One path per colour: some thousand cells cost a dozen elements, and print as sharp as text.
  paint() {
    const paths = Array.from({ length: 13 }, () => "");
    this.lines.forEach((line, row) => {
      for (let from = 0, to; from < line.length; from = to) {
        const level = colour(line[from]);
        for (to = from + 1; to < line.length && colour(line[to]) === level;) to += 1;
        const [x, y] = [this.x(from).toFixed(1), this.y(row).toFixed(1)];
        if (level) paths[level] += `M${x} ${y}H${this.x(to).toFixed(1)}V${this.y(row + 1).toFixed(1)}H${x}z`;
      }
    });
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${this.height + 38}`);
    paths.forEach((d, level) => d && draw(this.svg, "path", { d, class: `h${level}` }));
    draw(this.svg, "rect", { x: LEFT, y: TOP, width: RIGHT - LEFT, height: this.height, class: "frame" });
    this.label();
    for (const place of this.svg.dataset.out.split(" ").filter(Boolean)) {
      const [column, line] = place.split(",").map(Number);
      draw(this.svg, "rect", { x: this.x(column), y: this.y(line), class: "out",
        width: this.x(column + 1) - this.x(column), height: this.y(line + 1) - this.y(line) });
    }
    this.cursor = draw(this.svg, "rect", { class: "cursor", visibility: "hidden" });
  }
  label() {
    let free = -Infinity;
    this.names.forEach((name, line) => {
      const text = blockOf(name) ?? (name.startsWith("embed") ? "embed" : name.startsWith("ln_") ? "norm" : name);
      const before = line && (blockOf(this.names[line - 1]) ?? "");
      const y = this.y(line + 0.5) + 4;
      if (text === before || y < free) return;
      draw(this.svg, "text", { x: LEFT - 6, y, class: "end" }, text.slice(0, 9));
      free = y + 13;
    });
    free = -Infinity;
    this.starts.forEach((start, request) => {
      const x = this.x(start);
      if (request) draw(this.svg, "path", { d: `M${x} ${TOP}v${this.height}`, class: "cut" });
      if (x < free) return;
      draw(this.svg, "text", { x, y: this.height + 18, class: "start" }, `${request}:0`);
      free = x + 34;
    });
    const unit = this.per > 1 ? `request:position, ${this.per} positions per cell` : "request:position";
    draw(this.svg, "text", { x: (LEFT + RIGHT) / 2, y: this.height + 32 }, unit);
  }
  lineOf(hook) {
    const own = this.names.indexOf(hook);
    return own >= 0 ? own : this.names.indexOf(blockOf(hook) ?? "");
  }
  place(column) {
    const request = this.starts.findLastIndex((start) => start <= column);
    const from = (column - this.starts[request]) * this.per;
    return `${request}:${from}${this.per > 1 ? ` to ${request}:${from + this.per - 1}` : ""}`;
  }
  show(line, column) {
    const whole = column === undefined;
    const [from, to] = whole ? [0, this.columns] : [column, column + 1];
    for (const [key, value] of Object.entries({ visibility: "visible", x: this.x(from), y: this.y(line),
      width: this.x(to) - this.x(from), height: this.y(line + 1) - this.y(line) })) this.cursor.setAttribute(key, value);
  }
  // The rows of one hook as columns, against its bound.
  strip(line) {
    const cells = this.lines[line];
    const [low, high, foot] = [-2, 2, 92];
    const height = (code) => Math.min(Math.max((code - ONE) / 10, low), high) - low;
    const y = (code) => foot - (height(code) / (high - low)) * 84;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} 126`);
    svg.setAttribute("role", "img");
    const worst = cells.indexOf(Math.max(...cells));
    svg.setAttribute("aria-label", `Rows of ${this.names[line]}; worst ${this.place(worst)}, ${inWords(cells[worst])}`);
    for (const decade of [-2, -1, 0, 1, 2]) {
      const at = y(ONE + 10 * decade);
      draw(svg, "path", { d: `M${LEFT} ${at}H${RIGHT}`, class: decade ? "grid" : "limit" });
      draw(svg, "text", { x: LEFT - 6, y: at + 4, class: "end" }, decade ? `${10 ** decade} ×` : "bound");
    }
    cells.forEach((code, column) => {
      if (code <= 0) return;
      const [from, to, top] = [this.x(column), this.x(column + 1), Math.min(y(code), foot - 1)];
      const bar = draw(svg, "path", { d: `M${from + 0.4} ${foot}V${top}H${to - 0.4}V${foot}z`, class: code > ONE ? "over" : "under" });
      draw(bar, "title", {}, `${this.place(column)}: ${inWords(code)}`);
    });
    let free = -Infinity;
    this.starts.forEach((start, request) => {
      const x = this.x(start);
      if (request) draw(svg, "path", { d: `M${x} 8V${foot}`, class: "cut" });
      if (x < free) return;
      draw(svg, "text", { x, y: foot + 16, class: "start" }, `${request}:0`);
      free = x + 34;
    });
    draw(svg, "text", { x: (LEFT + RIGHT) / 2, y: foot + 30 }, "err(E) of each row ÷ the bound of this hook's worst row, by request:position");
    return svg;
  }
  worst(line) {
    return [...this.lines[line].entries()].filter(([, code]) => code > 0).sort((a, b) => b[1] - a[1]).slice(0, 5);
  }
}
