// An animation says how high it is, so that none has to be scrolled within the page; it is told the book's theme.
const dark = () => ['navy', 'coal', 'ayu'].some(theme => document.documentElement.classList.contains(theme));
const animations = () => document.querySelectorAll('.animation iframe');
addEventListener('message', event => {
    for (const frame of animations())
        if (frame.contentWindow === event.source && event.data && event.data.height > 0) {
            frame.style.height = `${event.data.height + 4}px`;
            frame.contentWindow.postMessage({ dark: dark() }, '*');
        }
});
// A frame that was loaded before this script has sent its height to nobody.
for (const frame of animations()) frame.contentWindow.postMessage({ ask: 'height' }, '*');
new MutationObserver(() => animations().forEach(frame => frame.contentWindow.postMessage({ dark: dark() }, '*')))
    .observe(document.documentElement, { attributes: true, attributeFilter: ['class'] });
