// Pieces of HTML that the page holds deflated: every text in them was escaped when the page was made.
const packs = [...document.querySelectorAll("script.pack")];
const groups = new Map();
const unpack = async (key) => {
  const [group, index] = key.split(".").map(Number);
  if (!groups.has(group)) {
    groups.set(group, (async () => {
      const bytes = Uint8Array.from(atob(packs[group].textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      return (await new Response(stream).text()).split("\x1e");
    })());
  }
  return (await groups.get(group))[index];
};
// Fills an element once; says so instead of staying empty where it cannot.
const fill = async (element, key) => {
  if (element.dataset.filled) return;
  element.dataset.filled = "yes";
  let html;
  try {
    html = await unpack(key);
  } catch (error) {
    const note = document.createElement("p");
    note.textContent = `This browser cannot unpack it (${error}); the figures are in results.parquet.`;
    element.append(note);
    return;
  }
  const template = document.createElement("template");
  template.innerHTML = html;
  element.append(template.content);
  element.querySelectorAll(".panel").forEach(preparePanel);
};
document.querySelectorAll("details[data-body]").forEach((details) =>
  details.addEventListener("toggle", () => { if (details.open) fill(details.querySelector(".body") ?? details, details.dataset.body); }));
