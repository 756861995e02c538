// A browser ends lines after a dash: "--" here, "split" on the next line. Words of code in a text stay whole.
for (const code of document.querySelectorAll('.content :not(pre) > code')) {
    if (code.closest('table') || code.childElementCount > 0 || !code.textContent.includes('-')) continue;
    code.replaceChildren(...code.textContent.split(/(\s+)/).map(word => {
        // What may be wider than a phone breaks as before.
        if (!word.includes('-') || word.length > 24) return word;
        const whole = document.createElement('span');
        whole.style.whiteSpace = 'nowrap';
        whole.textContent = word;
        return whole;
    }));
}
