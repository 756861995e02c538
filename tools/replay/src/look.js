const dark=on=>{document.documentElement.classList.toggle('dark',on);dispatchEvent(new Event('theme'));};
dark(matchMedia('(prefers-color-scheme:dark)').matches);
addEventListener('message',e=>{if(e.data&&typeof e.data.dark==='boolean')dark(e.data.dark);});
if(parent!==window){const tell=()=>parent.postMessage({height:document.body.offsetHeight},'*');
new ResizeObserver(tell).observe(document.body);
// The page around this one may listen later than the first height was sent: it asks when it does.
addEventListener('message',e=>{if(e.data&&e.data.ask==='height')tell();});}
// What is wider than the page scrolls: its right edge fades until the end is reached.
const scrolled=document.querySelectorAll('.scroll');
const fade=box=>box.classList.toggle('more',box.scrollWidth-box.clientWidth-box.scrollLeft>2);
scrolled.forEach(box=>box.addEventListener('scroll',()=>fade(box),{passive:true}));
new ResizeObserver(()=>scrolled.forEach(fade)).observe(document.body);
