//! Random input for everything that reads what clients send: no panic, no hang, and a few laws that must hold.
//!
//! `BERTH_FUZZ_SECONDS` says how long each target runs; `BERTH_FUZZ_SEED` repeats one case.

mod making;
mod patches;
mod requests;
mod texts;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::kubernetes::random::Random;

const USUAL: Duration = Duration::from_secs(2);
/// No single input may take longer; the machine may be busy with other things.
const LONGEST: Duration = Duration::from_secs(10);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Runs a target on one random case after the other; a failure names the seed of the case.
fn fuzz(mut target: impl FnMut(&mut Random)) {
    let time = number("BERTH_FUZZ_SECONDS").map_or(USUAL, Duration::from_secs);
    let only = number("BERTH_FUZZ_SEED");
    let end = Instant::now() + time;
    let mut seed = only.unwrap_or(1);
    loop {
        let begin = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(|| target(&mut Random::new(seed))));
        assert!(passed.is_ok(), "failed with BERTH_FUZZ_SEED={seed}");
        assert!(begin.elapsed() < LONGEST, "BERTH_FUZZ_SEED={seed} took {:?}", begin.elapsed());
        if only.is_some() || Instant::now() >= end {
            break;
        }
        seed += 1;
    }
    println!("{seed} cases");
}
