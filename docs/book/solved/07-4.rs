fn steps(rank: usize, ranks: usize) -> Vec<Step> {
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut steps = Vec::new();
    for hop in 0..ranks - 1 {
        let (ours, theirs) = (sent(rank, hop, ranks), sent(previous, hop, ranks));
        steps.push(Step::send(next, Loc::input(0, ours)));
        let (input, output) = (Loc::input(0, theirs), Loc::output(0, theirs));
        steps.push(Step::recv_reduce_copy(previous, input, output, hop == ranks - 2));
    }
    for hop in 0..ranks - 1 {
        steps.push(Step::send(next, Loc::output(0, sent(next, hop, ranks))));
        steps.push(Step::recv(previous, Loc::output(0, sent(rank, hop, ranks))));
    }
    steps
}
