//! Explicit-state model checker: runs a protocol through every order of calls, messages, deaths and news of deaths, and
//! shows the shortest run in which it goes wrong.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Event, Outcome};

/// Most states that are looked at. Three ranks of which two die have a hundredth of it.
const MOST_STATES: usize = 300_000;
/// Most messages that may be under way at once.
const MOST_MESSAGES: usize = 50;

/// One rank's part of an agreement.
pub(crate) trait Protocol: Clone + Eq + Hash {
    type Message: Clone + Eq + Hash + fmt::Debug;

    fn new(rank: usize, size: usize, value: u64) -> Self;
    fn step(&mut self, event: Event<Self::Message>, out: &mut Vec<(usize, Self::Message)>);
    fn decided(&self) -> Option<&Outcome>;
}

/// Next thing that happens.
#[derive(Clone)]
enum Step<M> {
    Call(usize),
    Deliver { from: usize, to: usize, message: M },
    Die(usize),
    Learn { rank: usize, dead: usize },
}

impl<M: fmt::Debug> fmt::Display for Step<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Call(rank) => write!(f, "rank {rank} calls"),
            Step::Deliver { from, to, message } => write!(f, "rank {from} -> rank {to}: {message:?}"),
            Step::Die(rank) => write!(f, "rank {rank} dies"),
            Step::Learn { rank, dead } => write!(f, "rank {rank} learns that rank {dead} is dead"),
        }
    }
}

/// The shortest run that goes wrong.
pub(crate) struct Counterexample {
    /// The fault at its end.
    pub(crate) why: String,
    /// Its steps and decisions, a line each.
    pub(crate) run: Vec<String>,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.why)?;
        self.run.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

impl fmt::Debug for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// All ranks, and the messages between them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct World<P: Protocol> {
    members: Vec<P>,
    called: BTreeSet<usize>,
    dead: BTreeSet<usize>,
    /// Rank, and a death that it knows of.
    news: BTreeSet<(usize, usize)>,
    /// Under way: from, to, message.
    net: Vec<(usize, usize, P::Message)>,
    /// The first decision, also of a rank that has died since.
    first: Option<(usize, Outcome)>,
}

/// The vote of a rank, which it alone has: all bits of `ranks` but its own.
fn vote(rank: usize, ranks: usize) -> u64 {
    ((1 << ranks) - 1) & !(1 << rank)
}

impl<P: Protocol> World<P> {
    fn new(ranks: usize) -> World<P> {
        World {
            members: (0..ranks).map(|rank| P::new(rank, ranks, vote(rank, ranks))).collect(),
            called: BTreeSet::new(),
            dead: BTreeSet::new(),
            news: BTreeSet::new(),
            net: Vec::new(),
            first: None,
        }
    }

    fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|rank| !self.dead.contains(rank))
    }

    /// The steps that are possible, and whether one of them is bound to come: nothing else can end a wait.
    fn steps(&self, crashes: usize) -> (Vec<Step<P::Message>>, bool) {
        let mut steps: Vec<_> = self.living().filter(|rank| !self.called.contains(rank)).map(Step::Call).collect();
        for rank in self.living() {
            let news = self.dead.iter().filter(|&&dead| !self.news.contains(&(rank, dead)));
            steps.extend(news.map(|&dead| Step::Learn { rank, dead }));
        }
        let mut bound = !steps.is_empty();
        for (from, to, message) in &self.net {
            bound |= !self.dead.contains(from);
            steps.push(Step::Deliver { from: *from, to: *to, message: message.clone() });
        }
        if self.dead.len() < crashes {
            steps.extend(self.living().map(Step::Die));
        }
        (steps, bound)
    }

    /// Does a step. The error says what is wrong after it.
    fn apply(&mut self, step: &Step<P::Message>) -> Result<(), String> {
        match step.clone() {
            Step::Call(rank) => {
                self.called.insert(rank);
                self.act(rank, Event::Call)
            }
            Step::Deliver { from, to, message } => {
                if let Some(at) = self.net.iter().position(|other| *other == (from, to, message.clone())) {
                    self.net.remove(at);
                }
                self.act(to, Event::Message { from, message })
            }
            Step::Die(rank) => {
                self.dead.insert(rank);
                self.net.retain(|(_, to, _)| *to != rank);
                Ok(())
            }
            Step::Learn { rank, dead } => {
                self.news.insert((rank, dead));
                self.act(rank, Event::Died(dead))
            }
        }
    }

    fn act(&mut self, rank: usize, event: Event<P::Message>) -> Result<(), String> {
        let mut out = Vec::new();
        self.members[rank].step(event, &mut out);
        if let Some((to, message)) = out.iter().find(|(to, _)| *to >= self.members.len()) {
            return Err(format!("rank {rank} sends {message:?} to rank {to}, which does not exist"));
        }
        let dead = &self.dead;
        self.net.extend(out.into_iter().filter(|(to, _)| !dead.contains(to)).map(|(to, message)| (rank, to, message)));
        if self.net.len() > MOST_MESSAGES {
            let why = "do the ranks answer each other without end?";
            return Err(format!("more than {MOST_MESSAGES} messages are under way: {why}"));
        }
        // Stable: worlds with the same messages are mostly the same world.
        self.net.sort_by_key(|(from, to, _)| (*from, *to));
        match (self.members[rank].decided().cloned(), &self.first) {
            (None, _) => Ok(()),
            (Some(outcome), Some((_, first))) if outcome == *first => Ok(()),
            (Some(_), Some((first, _))) => Err(format!("two outcomes: those of rank {first} and rank {rank}")),
            (Some(outcome), None) => {
                self.first = Some((rank, outcome.clone()));
                self.valid(&outcome)
            }
        }
    }

    /// Checks an outcome against the world in which it is decided.
    fn valid(&self, Outcome { value, alive }: &Outcome) -> Result<(), String> {
        if let Some(rank) = self.living().find(|rank| !alive.contains(rank)) {
            return Err(format!("rank {rank} lives, and the outcome leaves it out"));
        }
        if let Some(rank) = alive.iter().find(|rank| !self.called.contains(rank)) {
            return Err(format!("the outcome counts rank {rank}, which has not called"));
        }
        match alive.iter().fold(u64::MAX, |all, &rank| all & vote(rank, self.members.len())) {
            expected if expected == *value => Ok(()),
            expected => Err(format!("the outcome's value is {value}, and the votes of {alive:?} give {expected}")),
        }
    }
}

/// The world before one, and the step from there; none before the first.
type Before<P> = Option<(usize, Step<<P as Protocol>::Message>)>;

/// Runs `ranks` ranks, of which up to `crashes` die, through every order. Gives the number of states.
pub(crate) fn explore<P: Protocol>(ranks: usize, crashes: usize) -> Result<usize, Counterexample> {
    // 64 bits stand for a state: that two of 300,000 collide has a chance of one in four hundred million.
    let key = |world: &World<P>| {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        hasher.finish()
    };
    let start = World::<P>::new(ranks);
    let mut seen = HashSet::from([key(&start)]);
    // Breadth first: the first run that goes wrong is a shortest one. A world is dropped once its followers are known.
    let mut worlds = vec![Some(start)];
    let mut before: Vec<Before<P>> = vec![None];
    let mut at = 0;
    while at < worlds.len() {
        let Some(world) = worlds[at].take() else { break };
        let (steps, bound) = world.steps(crashes);
        if let Some(rank) = world.living().find(|&rank| !bound && world.members[rank].decided().is_none()) {
            return Err(show::<P>(
                ranks,
                &before,
                at,
                None,
                format!("rank {rank} waits without end: nothing more is bound to come"),
            ));
        }
        for step in steps {
            let mut next = world.clone();
            if let Err(why) = next.apply(&step) {
                return Err(show::<P>(ranks, &before, at, Some(step), why));
            }
            if seen.insert(key(&next)) {
                worlds.push(Some(next));
                before.push(Some((at, step)));
            }
        }
        if worlds.len() > MOST_STATES {
            let why = format!("more than {MOST_STATES} states: can it do with fewer messages?");
            return Err(show::<P>(ranks, &before, worlds.len() - 1, None, why));
        }
        at += 1;
    }
    Ok(worlds.len())
}

/// The run to the world `at`, and one step more.
fn show<P: Protocol>(
    ranks: usize,
    before: &[Before<P>],
    mut at: usize,
    last: Option<Step<P::Message>>,
    why: String,
) -> Counterexample {
    let mut steps: Vec<Step<P::Message>> = last.into_iter().collect();
    while let Some((parent, step)) = before.get(at).cloned().flatten() {
        steps.push(step);
        at = parent;
    }
    let mut world = World::<P>::new(ranks);
    let mut run = Vec::new();
    for step in steps.iter().rev() {
        let decided = |world: &World<P>| world.members.iter().map(|m| m.decided().cloned()).collect::<Vec<_>>();
        let earlier = decided(&world);
        // Whatever is wrong is the run's last step, and known.
        let _ = world.apply(step);
        run.push(step.to_string());
        for (rank, outcome) in decided(&world).into_iter().enumerate().filter(|(rank, now)| *now != earlier[*rank]) {
            run.extend(outcome.map(|outcome| format!("    rank {rank} decides {outcome:?}")));
        }
    }
    let lost = world.net.iter().filter(|(from, _, _)| world.dead.contains(from));
    run.extend(lost.map(|(from, to, message)| format!("(not arrived: rank {from} -> rank {to}: {message:?})")));
    Counterexample { why, run }
}

mod tests {
    use super::*;

    /// Answers each message with two.
    #[derive(Clone, PartialEq, Eq, Hash)]
    struct Echo;

    impl Protocol for Echo {
        type Message = ();

        fn new(_rank: usize, _size: usize, _value: u64) -> Echo {
            Echo
        }

        fn step(&mut self, _event: Event<()>, out: &mut Vec<(usize, ())>) {
            out.extend([(0, ()), (0, ())]);
        }

        fn decided(&self) -> Option<&Outcome> {
            None
        }
    }

    #[test]
    fn messages_without_end_are_noticed() {
        let run = explore::<Echo>(1, 0).unwrap_err();
        assert!(run.why.starts_with("more than 50 messages are under way"), "{run}");
        assert_eq!(run.run[..2], ["rank 0 calls", "rank 0 -> rank 0: ()"]);
    }
}
