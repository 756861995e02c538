// An animation says how high it is, so that none has to be scrolled within the page.
addEventListener('message', event => {
    for (const frame of document.querySelectorAll('.animation iframe'))
        if (frame.contentWindow === event.source && event.data && event.data.height > 0)
            frame.style.height = `${event.data.height + 4}px`;
});
