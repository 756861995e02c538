// A short name or option in a line of text stays whole: browsers break lines behind each hyphen, `--` included.
for (const code of document.querySelectorAll(".content :not(pre) > code")) {
    if (code.textContent.length <= (code.closest("table") ? 16 : 24)) code.style.whiteSpace = "nowrap";
}

// What is wider than the page scrolls: its right edge fades until the end is reached.
const wide = document.querySelectorAll(".content :is(pre, pre > code, .table-wrapper, .wide, .drawn)");
const fade = box => {
    const more = box.scrollWidth - box.clientWidth - box.scrollLeft > 2;
    box.classList.toggle("more", more && getComputedStyle(box).overflowX !== "visible");
};
for (const box of wide) box.addEventListener("scroll", () => fade(box), { passive: true });
new ResizeObserver(() => wide.forEach(fade)).observe(document.body);

// On a phone a table with sentences becomes cards (look.css): each cell names its column. Numbers stay in columns.
for (const table of document.querySelectorAll(".content table")) {
    const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    if (heads.length < 3 || !cells.some(cell => cell.textContent.length > 28)) continue;
    table.classList.add("cards");
    for (const cell of cells) if (heads[cell.cellIndex]) cell.dataset.column = heads[cell.cellIndex];
}
