//! One row of the table: fill, call, check, time.

use anyhow::{Result, bail};
use serde::Serialize;
use tinynccl::wire::Collective;
use tinynccl::{Comm, ReduceOp};

use crate::busbw;
use crate::call::{self, Owned};
use crate::case::{Case, Layout, Place};
use crate::measure::{self, Effort};
use crate::memory::{Arena, Memory};
use crate::pattern::{Number, Source, Tables};
use crate::stats::Timing;

/// The result for one size and place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    pub(crate) timing: Timing,
    /// Size / time, GB/s.
    pub(crate) algbw: f64,
    /// `algbw` times the collective's factor, GB/s.
    pub(crate) busbw: f64,
    /// Wrong elements on all ranks; `None` when they were not checked.
    pub(crate) wrong: Option<u64>,
}

/// The places that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Places {
    /// In place and out of place.
    Both,
    /// Out of place.
    Out,
    /// In place.
    In,
    /// As MPI's functions are called: broadcast in place, all others out of place.
    Mpi,
}

impl Places {
    fn wants(self, collective: Collective, place: Place) -> bool {
        match self {
            Places::Both => true,
            Places::Out => place == Place::Out,
            Places::In => place == Place::In,
            Places::Mpi => (place == Place::In) == (collective == Collective::Broadcast),
        }
    }
}

/// Settings of the measurement, the same for all rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) effort: Effort,
    pub(crate) places: Places,
    pub(crate) check: bool,
    pub(crate) asynchronous: bool,
    /// Each call is in a group with another one.
    pub(crate) grouped: bool,
}

/// Runs one size and place; `None` when the library does not offer it.
pub(crate) fn run<T: Number>(
    comm: &Comm,
    case: &Case,
    place: Place,
    layout: Layout,
    tables: &Tables<T>,
    settings: &Settings,
    arena: &mut Arena,
) -> Result<Option<Measured>> {
    if !settings.places.wants(case.collective, place) {
        return Ok(None);
    }
    let has_place = place == Place::Out || case.has_in_place();
    if !has_place || settings.asynchronous && !call::has_async(case.collective) {
        return Ok(None);
    }
    let row = Row { comm, case, place, layout, tables };
    let (timing, wrong) =
        if settings.asynchronous { row.asynchronous(settings)? } else { row.blocking(settings, arena)? };
    let Some(timing) = timing else { bail!("nothing was measured") };
    let algbw = busbw::algbw(case.bytes(layout), timing.median);
    let busbw = algbw * busbw::factor(case.collective, comm.size());
    Ok(Some(Measured { timing, algbw, busbw, wrong }))
}

struct Row<'a, T> {
    comm: &'a Comm,
    case: &'a Case,
    place: Place,
    layout: Layout,
    tables: &'a Tables<T>,
}

impl<T: Number> Row<'_, T> {
    fn blocking(&self, settings: &Settings, arena: &mut Arena) -> Result<(Option<Timing>, Option<u64>)> {
        let mut memory = arena.memory::<T>(self.layout.input, self.layout.output)?;
        let mut wrong = 0;
        let call = if settings.grouped { call::grouped } else { call::blocking };
        memory.each(|memory| {
            self.prepare_input(memory.input());
            self.prepare_output(memory.output());
        });
        if settings.check {
            call(self.comm, self.case, self.place, &mut memory)?;
            wrong += self.check_both(&mut memory);
        }
        memory.each(|memory| self.before_timing(memory));
        let timing = measure::time(self.comm, &settings.effort, || {
            call(self.comm, self.case, self.place, &mut memory)?;
            memory.advance();
            Ok(())
        })?;
        memory.back();
        // Out of place every call has the same result, so the last one's output is checked too.
        if settings.check && self.place == Place::Out {
            wrong += self.check_both(&mut memory);
        }
        Ok((timing, self.total(settings.check, wrong + memory.damage())?))
    }

    fn asynchronous(&self, settings: &Settings) -> Result<(Option<Timing>, Option<u64>)> {
        let zero = T::from_i64(0);
        let mut owned = Owned { input: vec![zero; self.layout.input], output: vec![zero; self.layout.output] };
        let mut wrong = 0;
        if settings.check {
            self.prepare_input(&mut owned.input);
            self.prepare_output(&mut owned.output);
            call::asynchronous(self.comm, self.case, self.place, &mut owned)?;
            wrong += self.check(owned.written(self.case, self.place));
        }
        if self.place == Place::In {
            owned.written(self.case, self.place).fill(zero);
        }
        let timing = measure::time(self.comm, &settings.effort, || {
            call::asynchronous(self.comm, self.case, self.place, &mut owned)
        })?;
        if settings.check && self.place == Place::Out {
            wrong += self.check(owned.written(self.case, self.place));
        }
        Ok((timing, self.total(settings.check, wrong)?))
    }

    fn prepare_input(&self, input: &mut [T]) {
        self.tables.fill(input, Source::Input(self.comm.rank(), 0));
    }

    /// Before a checked call: out of place fills the output with poison, in place writes the input into the buffer.
    fn prepare_output(&self, output: &mut [T]) {
        self.tables.fill(output, Source::Untouched);
        if self.place == Place::In {
            let rank = self.comm.rank();
            // all_gather: only our own segment is input. Otherwise input and output have the same length.
            let start = if output.len() == self.layout.input { 0 } else { rank * self.layout.input };
            if let Some(own) = output.get_mut(start..start + self.layout.input) {
                self.tables.fill(own, Source::Input(rank, 0));
            }
        }
    }

    /// In place, the result of one timed call is the input of the next: zeros stay zeros and cannot overflow.
    fn before_timing(&self, memory: &mut Memory<'_, T>) {
        if self.place == Place::In {
            memory.input().fill(T::from_i64(0));
            memory.output().fill(T::from_i64(0));
        }
    }

    /// Wrong elements in the memory that the call wrote, and in an input that it must not write.
    fn check_both(&self, memory: &mut Memory<'_, T>) -> usize {
        if self.place == Place::In && self.case.in_place_uses_input() {
            return self.check(memory.input());
        }
        let mut wrong = self.check(memory.output());
        if self.place == Place::Out {
            let source = Source::Input(self.comm.rank(), 0);
            wrong += self.report("input changed: ", self.tables.wrong(memory.input(), source), memory.input(), 0);
        }
        wrong
    }

    /// Wrong elements in the memory that the call had to write.
    fn check(&self, memory: &[T]) -> usize {
        let (mut wrong, mut start) = (0, 0);
        for (len, source) in self.case.expected(self.place, self.layout, self.comm.rank(), self.comm.size()) {
            let Some(part) = memory.get(start..start + len) else { return wrong + memory.len() };
            wrong += self.report("", self.tables.wrong(part, source), part, start);
            start += len;
        }
        wrong
    }

    /// One line on standard error about the first wrong element.
    fn report(&self, what: &str, (wrong, first): (usize, Option<(usize, T)>), memory: &[T], start: usize) -> usize {
        if let Some((index, expected)) = first {
            let Some(got) = memory.get(index) else { return wrong };
            eprintln!(
                "rank {}: {}, {} elements: {what}{wrong} wrong, the first at {}: {got:?}, expected {expected:?}",
                self.comm.rank(),
                self.case,
                memory.len(),
                start + index,
            );
        }
        wrong
    }

    /// Sum over the ranks.
    fn total(&self, check: bool, wrong: usize) -> Result<Option<u64>> {
        if !check {
            return Ok(None);
        }
        let mut total = [wrong as u64];
        self.comm.all_reduce_in_place(&mut total, ReduceOp::Sum)?;
        Ok(Some(total[0]))
    }
}
