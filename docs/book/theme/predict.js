// Answers under a heading "Predict …" open when a prediction stands under each question. It is kept in this browser and
// cannot be changed. Without this script the answers are folded, and nothing else.
for (const heading of document.querySelectorAll("h2")) {
    if (!heading.textContent.trim().startsWith("Predict")) continue;
    const section = [];
    for (let e = heading.nextElementSibling; e && !/^H[12]$/.test(e.tagName); e = e.nextElementSibling) section.push(e);
    const list = section.find(e => e.tagName === "OL"), answers = section.find(e => e.tagName === "DETAILS");
    if (list && answers) predictFirst(list, answers);
}

function predictFirst(list, answers) {
    const questions = [...list.children], asked = questions.map(q => q.textContent.trim());
    const root = new URL(typeof path_to_root === "undefined" ? "./" : path_to_root || "./", location.href).pathname;
    const key = "tinynccl-predictions:" + location.pathname.slice(root.length);
    const make = (name, text, from) => Object.assign(document.createElement(name), { textContent: text, ...from });
    const fields = questions.map((question, i) => {
        const field = make("input", "", { type: "text", className: "prediction", placeholder: "your prediction" });
        field.setAttribute("aria-label", `Your prediction for question ${i + 1}`);
        question.append(field);
        return field;
    });
    const lock = make("button", "Lock my predictions", { type: "button" });
    const skip = make("a", "show without predicting", { href: "#" });
    const says = make("span", "");
    says.setAttribute("role", "status");
    const bar = make("p", "", { className: "predict" });
    bar.append(lock, " ", skip, " ", says);
    list.after(bar);

    let open = false;
    const unlock = () => { open = answers.open = true; };
    const show = predicted => {
        fields.forEach((field, i) => Object.assign(field, { value: predicted[i], readOnly: true }));
        lock.remove();
        skip.remove();
        says.textContent = "Your predictions are locked.";
        // Each above its answer.
        const items = answers.querySelector("ol")?.children ?? [];
        if (items.length === predicted.length)
            predicted.forEach((p, i) => items[i].prepend(make("div", `You predicted: ${p}`, { className: "predicted" })));
        open = true;
    };
    // Without storage, as where a browser forbids it, predictions last as long as the page.
    try {
        const kept = JSON.parse(localStorage.getItem(key) ?? "null");
        if (kept && JSON.stringify(kept.asked) === JSON.stringify(asked)) show(kept.predicted);
    } catch { }
    lock.onclick = () => {
        const predicted = fields.map(field => field.value.trim()), missing = predicted.findIndex(p => !p);
        if (missing >= 0) {
            says.textContent = `Question ${missing + 1} has no prediction yet; a guess will do.`;
            fields[missing].focus();
            return;
        }
        try { localStorage.setItem(key, JSON.stringify({ asked, predicted })); } catch { }
        show(predicted);
        unlock();
    };
    skip.onclick = event => {
        event.preventDefault();
        unlock();
    };
    answers.querySelector("summary").addEventListener("click", event => {
        if (open) return;
        event.preventDefault();
        says.textContent = "Predict first: a guess under each question, then lock them.";
    });
}
