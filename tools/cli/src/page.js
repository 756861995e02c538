const frames=document.querySelectorAll('.frame'),logs=document.querySelectorAll('.log'),root=document.documentElement;
let at=0,timer=null;const last=frames.length-1,sending=sent[last].length?last:last-1;
const rounds=sending+first;
function show(to){at=Math.max(0,Math.min(last,to));
frames.forEach((f,i)=>f.classList.toggle('shown',i===at));logs.forEach((l,i)=>l.classList.toggle('shown',i===at));
document.getElementById('at').textContent=at+first===0?'start':at>sending?'done':'round '+(at+first)+' of '+rounds;
document.getElementById('back').disabled=at===0;document.getElementById('forward').disabled=at===last;count();}
function count(){const all={};sent.slice(0,at+1).forEach((round,i)=>round.forEach(([from,to,bytes])=>
[from+'-'+to,from+'-all'].forEach(k=>{const c=all[k]||(all[k]={bytes:0,now:false});c.bytes+=bytes;c.now=c.now||i===at;})));
document.querySelectorAll('td[data-link]').forEach(td=>{const c=all[td.dataset.link];
td.textContent=c?c.bytes.toLocaleString('en'):'';td.classList.toggle('now',!!c&&c.now);});}
// Seconds that a message travels; a round is shown a little longer.
const seconds=()=>1.2/Number(document.getElementById('speed').value);
function stop(){clearTimeout(timer);timer=null;document.getElementById('play').textContent='Play';}
function tick(){timer=setTimeout(()=>{if(at===last){stop();return;}show(at+1);tick();},seconds()*1500);}
function play(){if(timer){stop();return;}show(at===last?0:at);
document.getElementById('play').textContent='Stop';tick();}
function pace(){root.style.setProperty('--time',seconds()+'s');}
document.getElementById('speed').onchange=pace;
document.getElementById('back').onclick=()=>{stop();show(at-1);};
document.getElementById('forward').onclick=()=>{stop();show(at+1);};
document.getElementById('play').onclick=play;
document.addEventListener('keydown',e=>{if(e.target.id==='speed')return;if(e.key==='ArrowLeft'){stop();show(at-1);}
if(e.key==='ArrowRight'){stop();show(at+1);}if(e.key==='Home'){stop();show(0);}
if(e.key==='End'){stop();show(last);}});pace();show(0);
