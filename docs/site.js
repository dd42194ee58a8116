// The search of a page of the site: SECTIONS is the index that make_site.py writes, UP the way to its folder.
const field = document.getElementById("search"), found = document.getElementById("found");
const pages = document.getElementById("pages");
if (matchMedia("(max-width: 50rem)").matches) pages.open = false;
const escaped = (text) => text.replace(/[&<>]/g, (x) => "&#" + x.charCodeAt(0) + ";");
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (text) => text.toLowerCase().includes(words.join(" "));
  const rank = (x) => 2 * has(x[1]) + has(x[2]); // the words in a row, and in a heading, come first
  const hits = SECTIONS.filter((x) => words.every((word) => (x[1] + " " + x[2]).toLowerCase().includes(word)));
  hits.sort((a, b) => rank(b) - rank(a)).splice(20);
  found.innerHTML = !words.length ? "" : hits.map(([url, title, text]) => {
    const at = Math.max(0, text.toLowerCase().indexOf(has(text) ? words.join(" ") : words[0]) - 40);
    const part = escaped(text.slice(at, at + 120));
    return `<li><a href="${UP}${url}">${escaped(title)}</a><small>${part}</small></li>`;
  }).join("") || "<li>nothing found</li>";
});
