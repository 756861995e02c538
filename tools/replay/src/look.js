const dark=on=>{document.documentElement.classList.toggle('dark',on);dispatchEvent(new Event('theme'));};
dark(matchMedia('(prefers-color-scheme:dark)').matches);
addEventListener('message',e=>{if(e.data&&typeof e.data.dark==='boolean')dark(e.data.dark);});
if(parent!==window){const tell=()=>parent.postMessage({height:document.body.offsetHeight},'*');
new ResizeObserver(tell).observe(document.body);}
