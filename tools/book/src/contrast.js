// Words whose contrast with what is behind them is less than WCAG's AA asks for: 4.5, and 3 for large ones.
(() => {
    const parts = colour => {
        const all = colour.match(/[\d.]+/g).map(Number);
        return all.length > 3 ? all : [...all, 1];
    };
    const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const linear = part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
    const luminance = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
    const found = new Map(), seen = new Set();
    const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (words.nextNode()) {
        const element = words.currentNode.parentElement, text = words.currentNode.textContent.trim();
        if (!text || seen.has(element) || !element.checkVisibility()) continue;
        if (element.closest('script, style, svg, :disabled')) continue;
        seen.add(element);
        const behind = [];
        let opacity = 1;
        for (let e = element; e; e = e.parentElement) {
            const style = getComputedStyle(e);
            opacity *= style.opacity;
            behind.push(parts(style.backgroundColor));
            if (behind.at(-1)[3] === 1) break;
        }
        const page = behind.reduceRight((under, top) => over(top, under), [255, 255, 255, 1]);
        const style = getComputedStyle(element), colour = parts(style.color);
        const ink = over([...colour.slice(0, 3), colour[3] * opacity], page);
        const [light, dark] = [luminance(ink), luminance(page)].sort((a, b) => b - a);
        const ratio = (light + 0.05) / (dark + 0.05), size = parseFloat(style.fontSize);
        if (ratio < (size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5))
            found.set(`${element.tagName}.${element.className}`,
                `${ratio.toFixed(1)}, ${element.tagName}: ${text.slice(0, 40)}`);
    }
    return [...found.values()].slice(0, 5);
})()
