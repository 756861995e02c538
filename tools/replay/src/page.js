// Times are nanoseconds since the first call of a run. Runs side by side share the clock.
// Kinds with dark words in the dark theme.
const DARK=[2,4,6,7,8,9];
const WAIT=6,CALL=0,CARRIED=1,STEP=2,$=id=>document.getElementById(id);
const runs=JSON.parse($('data').textContent).map((d,index)=>{
const r={...d,slices:[],messages:[],calls:[],of:[]},s=d.slices,m=d.messages,c=d.calls;
for(let i=0;i<s.length;i+=7)r.slices.push({track:s[i],kind:s[i+1],name:s[i+2],round:s[i+3],begin:s[i+4],end:s[i+4]+s[i+5],
bytes:s[i+6],up:-1,depth:0});
for(let i=0;i<m.length;i+=4)r.messages.push({from:r.slices[m[i]],to:r.slices[m[i+1]],left:m[i+2],there:m[i+2]+m[i+3]});
for(let i=0;i<c.length;i+=4)r.calls.push({begin:c[i],end:c[i]+c[i+1],name:c[i+2],ranks:c[i+3]});
r.tracks=d.tracks.map(([rank,name])=>({rank,name,first:0,last:0}));
nest(r);
r.section=document.querySelector(`section[data-run="${index}"]`);
r.stage=r.section.querySelector('.stage');r.lines=r.section.querySelector('.lines');r.states=r.section.querySelector('.states');
r.items=r.ranks.map(()=>r.states.appendChild(document.createElement('li')));
return r;});
// Which slice each one lies in, where each track's slices are, and the number of steps of each call on a lane.
function nest(r){let open=[],group=[];r.tracks.forEach(t=>{t.first=t.last=-1;});
r.slices.forEach((s,i)=>{const t=r.tracks[s.track];if(t.first<0){t.first=i;open=[];}t.last=i+1;
while(open.length&&r.slices[open[open.length-1]].end<=s.begin)open.pop();
s.up=open.length?open[open.length-1]:-1;s.depth=open.length;open.push(i);
if(s.kind!==STEP)return;if(s.round===1)group=[];group.push(s);s.group=group;});}
const begin=Math.min(...runs.map(r=>r.begin)),end=Math.max(...runs.map(r=>r.end));
const starts=[...new Set(runs.flatMap(r=>r.calls.map(c=>c.begin)))].sort((a,b)=>a-b);
const middles=runs.flatMap(r=>r.messages.map(m=>(m.left+m.there)/2)).sort((a,b)=>a-b);
const lengths=runs.flatMap(r=>r.calls.map(c=>c.end-c.begin)).sort((a,b)=>a-b);
const usual=Math.max(1000,lengths.length?lengths[lengths.length>>1]:(end-begin)/50);
let now=starts.length?starts[0]:begin,wide=usual*1.5,frame=null,before=0,skipped='',colour=[],ink={};
// `?call=WORDS` opens the page at the last call whose name has these words; where runs end at different times, at that of
// the run that ends first, so that each shows something.
const asked=new URLSearchParams(location.search).get('call');
const opened=asked?runs.map(r=>r.calls.filter(c=>r.names[c.name].includes(asked)).pop()).filter(Boolean):[];
if(opened.length)now=Math.min(...opened.map(c=>c.begin));
// Else at a message of the last call that has any: something moves.
else if(!asked)for(const r of runs){const c=r.calls.findLast(c=>c.ranks===r.ranks.length&&r.messages.some(m=>m.left>=c.begin&&m.there<=c.end));
const m=c&&r.messages.find(m=>m.left>=c.begin&&m.there<=c.end);if(m){now=(m.left+m.there)/2;break;}}
// The first index whose value is above `x`.
function above(n,value,x){let a=0,b=n;while(a<b){const m=(a+b)>>1;if(value(m)>x)b=m;else a=m+1;}return a;}
// The innermost slice of a track at a time, or null.
function inner(r,t,at){if(t.first<0)return null;
let i=t.first+above(t.last-t.first,k=>r.slices[t.first+k].begin,at)-1;if(i<t.first)return null;
while(i>=0&&r.slices[i].end<=at)i=r.slices[i].up;return i<0?null:r.slices[i];}
const time=ns=>Math.abs(ns)<1e6?(ns/1e3).toFixed(1)+' us':Math.abs(ns)<1e9?(ns/1e6).toFixed(3)+' ms':(ns/1e9).toFixed(3)+' s';
// What each rank does: its call, its steps, the first cause of a wait.
function state(r,rank,at){let call='',kind=-1,line=-1,other='';const steps=[];let waits='';
for(const t of r.tracks){if(t.rank!==rank)continue;const s=inner(r,t,at);if(!s)continue;let step=null;
for(let u=s;u;u=u.up<0?null:r.slices[u.up]){if(u.kind===STEP)step=u;if(u.kind<=CARRIED)call=r.names[u.name];}
if(step)steps.push(`step ${step.round} of ${step.group.length}: ${r.names[step.name]}`);
if(s.kind>=WAIT&&(!waits||step))waits=r.names[s.name];
// A lane that works counts most, then a lane that waits, then the thread.
if(s.kind>CARRIED&&s.kind!==STEP&&s.kind<WAIT)other=r.names[s.name];
const weight=s.kind===STEP?4:step?3:s.kind>=WAIT?2:s.kind===CALL?0:1;
if(weight>line){line=weight;kind=s.kind;}}
const said=[call||other||(waits||steps.length?'':'no call'),steps.slice(0,2).join('; ')+(steps.length>2?`; ${steps.length-2} lanes more`:''),waits];
return{kind,words:said.filter(Boolean).join('. ')};}
function canvas(c,high){const w=c.clientWidth,k=devicePixelRatio||1;
if(c.width!==Math.round(w*k)||c.height!==Math.round(high*k)){c.width=Math.round(w*k);c.height=Math.round(high*k);c.style.height=high+'px';}
const g=c.getContext('2d');g.setTransform(k,0,0,k,0,0);g.clearRect(0,0,w,high);g.font='11px sans-serif';g.textBaseline='middle';return[g,w];}
function place(r,i,w,h,size){const n=r.ranks.length,a=2*Math.PI*i/n-Math.PI/2;
return[w/2+(Math.min(w/2,h*.8)-size-14)*Math.cos(a),h/2+(h/2-size-8)*Math.sin(a)];}
function stage(r){const h=Math.max(200,Math.min(320,r.stage.clientWidth*.6)),[g,w]=canvas(r.stage,h),n=r.ranks.length;
const size=Math.max(5,Math.min(17,w/n/1.6)),at=i=>place(r,i,w,h,size);
const flying=r.messages.filter(m=>m.left<=now&&now<=m.there);r.flying=flying.length;
for(const m of flying){const a=at(r.tracks[m.from.track].rank),b=at(r.tracks[m.to.track].rank);
g.strokeStyle=ink.faint;g.lineWidth=2;g.beginPath();g.moveTo(...a);g.lineTo(...b);g.stroke();}
r.ranks.forEach(([rank],i)=>{const s=state(r,i,now),[x,y]=at(i);
g.fillStyle=s.kind<0?ink.none:colour[s.kind];g.beginPath();g.arc(x,y,size,0,7);g.fill();
const failed=r.failures.some(f=>f[0]===i&&f[1]<=now);
g.lineWidth=failed?3:1;g.strokeStyle=failed?colour[9]:ink.ink;g.stroke();
if(size>8){g.font='bold 12px sans-serif';g.textAlign='center';g.lineWidth=3;g.strokeStyle=ink.paper;g.strokeText(rank,x,y+1);
g.fillStyle=ink.ink;g.fillText(rank,x,y+1);g.font='11px sans-serif';g.textAlign='left';}
r.items[i].textContent=`rank ${rank}: ${s.words}${failed?'. failed':''}`;});
for(const m of flying){const a=at(r.tracks[m.from.track].rank),b=at(r.tracks[m.to.track].rank);
const f=.12+.76*(m.there>m.left?(now-m.left)/(m.there-m.left):.5),x=a[0]+(b[0]-a[0])*f,y=a[1]+(b[1]-a[1])*f;
g.fillStyle=ink.now;g.beginPath();g.arc(x,y,6,0,7);g.fill();
if(flying.length<=12){const words=size_of(m.from.bytes);g.lineWidth=3;g.strokeStyle=ink.paper;g.strokeText(words,x+8,y-8);
g.fillStyle=ink.ink;g.fillText(words,x+8,y-8);}}}
const size_of=b=>b<1024?b+' B':b<1048576?+(b/1024).toFixed(1)+' KiB':+(b/1048576).toFixed(1)+' MiB';
function lines(r){const rows=r.tracks.length,row=Math.max(3,Math.min(18,Math.floor(420/Math.max(1,rows)))),gap=row>6?5:1;
const tops=[];let y=2,last=-1;r.tracks.forEach((t,i)=>{if(t.rank!==last&&i)y+=gap;last=t.rank;tops.push(y);y+=row;});
const axis=16,[g,w]=canvas(r.lines,y+axis),left=w<600||row<9?30:104;r.left=left;
const from=now-wide*.4,x=ns=>left+(ns-from)/wide*(w-left);r.from=from;
g.save();g.beginPath();g.rect(left,0,w-left,y);g.clip();
r.tracks.forEach((t,i)=>{if(t.first<0)return;const list=[];
const first=above(t.last-t.first,k=>r.slices[t.first+k].begin,from)+t.first;
for(let p=first>t.first?first-1:-1;p>=0;p=r.slices[p].up)list.unshift(p);
for(let p=first;p<t.last&&r.slices[p].begin<from+wide;p++)list.push(p);
let seen=-1,what=-1;
for(const p of list){const s=r.slices[p];if(s.end<from)continue;const a=x(s.begin),b=x(s.end),thin=Math.max(1,b-a);
if(thin===1&&Math.floor(a)===seen&&what===s.kind)continue;seen=Math.floor(a);what=s.kind;
const inset=Math.min(row/3,Math.min(s.depth,2)*(row>9?3:1));
g.fillStyle=colour[s.kind];g.fillRect(a,tops[i]+inset/2,thin,row-1-inset);
// What lies in a slice covers its words.
if(row>12&&thin>26&&!(p+1<t.last&&r.slices[p+1].up===p)){const words=r.names[s.name];
if(g.measureText(words).width<Math.min(b,w)-Math.max(a,left)-6){g.fillStyle=ink.dark?DARK.includes(s.kind)?'#111':'#eee':s.kind===STEP?'#fff':'#222';
g.fillText(words,Math.max(a,left)+3,tops[i]+row/2);}}}});
const near=r.messages.filter(m=>m.there>=from&&m.left<=from+wide);
if(near.length<=400){g.strokeStyle=ink.now;g.lineWidth=1;g.globalAlpha=.6;for(const m of near){g.beginPath();
g.moveTo(x(m.left),tops[m.from.track]+row/2);g.lineTo(x(m.there),tops[m.to.track]+row/2);g.stroke();}g.globalAlpha=1;}
for(const[i,at]of r.failures){g.fillStyle=colour[9];const k=r.tracks.findIndex(t=>t.rank===i);if(k>=0)g.fillRect(x(at)-1,tops[k],3,row);}
g.restore();
g.fillStyle=ink.ink;let named=-1;r.tracks.forEach((t,i)=>{const rank=r.ranks[t.rank][0];
if(left>60){g.fillText((named!==t.rank?rank+'  ':'    ')+t.name,4,tops[i]+row/2,left-8);}
else if(named!==t.rank)g.fillText(rank,4,tops[i]+row/2);named=t.rank;});
const mark=x(now);g.strokeStyle=ink.ink;g.lineWidth=1;g.beginPath();g.moveTo(mark,0);g.lineTo(mark,y);g.stroke();
g.textAlign='left';g.fillText(time(from),left,y+axis/2);g.textAlign='right';g.fillText(time(from+wide),w-2,y+axis/2);g.textAlign='left';}
function draw(){runs.forEach(r=>{stage(r);lines(r);});
const made=above(starts.length,i=>starts[i],now),speed=Number($('speed').value);
$('at').textContent=`${time(now)}, call ${made} of ${starts.length}. 1 s shows ${time(usual/4*speed)}.${skipped}`;
$('scrub').value=end>begin?Math.round((now-begin)/(end-begin)*1e4):0;
$('last').disabled=!starts.length||now<=starts[0];$('call').disabled=made===starts.length;
$('message').disabled=!middles.length||now>=middles[middles.length-1];}
function go(to){skipped='';now=Math.max(begin,Math.min(end,to));draw();}
function stop(){cancelAnimationFrame(frame);frame=null;$('play').textContent='Play';}
// Whether a call of any run is under way.
const calling=at=>runs.some(r=>{let i=above(r.calls.length,k=>r.calls[k].begin,at);
for(let back=0;i-->0&&back<64;back++)if(r.calls[i].end>at)return true;return false;});
function tick(stamp){const passed=Math.min(100,stamp-before);before=stamp;now+=passed/4000*usual*Number($('speed').value);
if(starts.length&&!calling(now)){const next=starts[above(starts.length,i=>starts[i],now)],to=next===undefined?end:next;
if(to-now>usual/8){skipped=` Skipped ${time(to-now)} without a call.`;now=to;}}
if(now>=end){now=end;draw();stop();return;}draw();frame=requestAnimationFrame(tick);}
function play(){if(frame!==null){stop();return;}if(now>=end)now=begin;skipped='';$('play').textContent='Stop';
before=performance.now();frame=requestAnimationFrame(tick);}
function nextCall(){stop();const i=above(starts.length,k=>starts[k],now);if(i<starts.length)go(starts[i]);}
function lastCall(){stop();const i=above(starts.length,k=>starts[k],now-1e-6)-1;if(i>=0)go(starts[starts[i]<now?i:Math.max(0,i-1)]);}
function nextMessage(){stop();const i=above(middles.length,k=>middles[k],now);if(i<middles.length)go(middles[i]);}
function zoom(by){wide=Math.max(100,Math.min((end-begin)*2+100,wide*by));draw();}
$('play').onclick=play;$('call').onclick=nextCall;$('last').onclick=lastCall;$('message').onclick=nextMessage;
$('in').onclick=()=>zoom(.5);$('out').onclick=()=>zoom(2);$('speed').onchange=draw;
$('scrub').oninput=e=>{stop();go(begin+(end-begin)*e.target.value/1e4);};
runs.forEach(r=>{let drag=null;const at=e=>e.clientX-r.lines.getBoundingClientRect().left;
r.lines.onpointerdown=e=>{stop();drag={x:at(e),now,moved:false};r.lines.setPointerCapture(e.pointerId);};
r.lines.onpointermove=e=>{if(!drag)return;const moved=at(e)-drag.x;if(Math.abs(moved)>3)drag.moved=true;
if(drag.moved)go(drag.now-moved/(r.lines.clientWidth-r.left)*wide);};
r.lines.onpointerup=e=>{if(drag&&!drag.moved)go(r.from+(at(e)-r.left)/(r.lines.clientWidth-r.left)*wide);drag=null;};});
document.addEventListener('keydown',e=>{if(/INPUT|SELECT/.test(e.target.tagName))return;
if(e.key==='ArrowRight')nextCall();if(e.key==='ArrowLeft')lastCall();if(e.key==='.')nextMessage();
if(e.key===' '&&e.target.tagName!=='BUTTON'){e.preventDefault();play();}});
function paint(){const style=getComputedStyle(document.body),v=name=>style.getPropertyValue(name).trim();
colour=Array.from({length:15},(_,i)=>v('--k'+i));ink={dark:document.documentElement.classList.contains('dark'),ink:v('--ink'),faint:v('--faint'),none:v('--none'),now:v('--now'),
paper:style.backgroundColor};draw();}
addEventListener('theme',paint);addEventListener('resize',draw);paint();
