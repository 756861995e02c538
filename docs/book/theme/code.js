// A short name or option in a line of text stays whole: browsers break lines behind each hyphen, `--` included.
for (const code of document.querySelectorAll(".content :not(pre) > code")) {
    if (code.textContent.length <= (code.closest("table") ? 16 : 24)) code.style.whiteSpace = "nowrap";
}
