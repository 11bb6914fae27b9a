// Optional comfort: without it every case can still be opened, found and linked to.
(() => {
  const cases = [...document.querySelectorAll("details.case")];
  if (cases.length < 2) return;
  const bar = document.createElement("p");
  bar.className = "tools";
  bar.innerHTML = '<label>Filter cases <input type="search" placeholder="words of title, model, dtype…"></label>' +
    '<button type="button">Open all</button> <button type="button">Close all</button> <output></output>';
  document.querySelector("nav").after(bar);
  const [input, output] = [bar.querySelector("input"), bar.querySelector("output")];
  const texts = cases.map((c) =>
    (c.querySelector("summary").textContent + " " + c.querySelector(".body").id).toLowerCase());
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    cases.forEach((c, i) => { c.hidden = !words.every((w) => texts[i].includes(w)); shown += !c.hidden; });
    output.textContent = words.length ? `${shown} of ${cases.length} cases` : "";
  });
  bar.querySelectorAll("button").forEach((b, i) => b.addEventListener("click", () =>
    cases.forEach((c) => { if (!c.hidden) c.open = i === 0; })));
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const around = target && target.closest("details");
    if (around) { around.hidden = false; around.open = true; around.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
