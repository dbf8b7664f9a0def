//! Death at every step of everything that people ask for: before each write and each call, and after it is done but
//! before anybody hears of it. Whatever happens meanwhile, in the end nothing is left that no object owns, and nothing
//! is missing.
//!
//! `BERTH_SIDECARS_KILLS=2` kills the successor too, at each kind of its steps.

use std::collections::BTreeSet;

use crate::acts::{Act, goals};
use crate::power::{Cut, Power};
use crate::world::{Goals, World};

/// What people do after the first death, while nobody works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// They wait until it is done.
    Nothing,
    /// They take back what they asked for.
    TakeBack,
}

/// An act, and what people do when those who serve it die.
struct Suite {
    world: World,
    act: Act,
    meanwhile: Meanwhile,
    runs: usize,
}

impl Suite {
    /// Asks, and has one life after the other die; the steps of each life, the last of which is the first that lived on.
    async fn run(&mut self, deaths: &[&Cut]) -> Vec<BTreeSet<String>> {
        self.runs += 1;
        let (world, act) = (&self.world, self.act);
        let at = format!("{act:?}, {:?}, {deaths:?}", self.meanwhile);
        let subjects = ["data".to_owned()];
        let life = world.life(&Power::on());
        act.prepare(world, &subjects).await;
        life.stop().await;
        act.ask(world, "data").await;
        let mut goal = goals(&subjects, act.after());
        let mut lives = Vec::new();
        for cut in deaths {
            let power = Power::until((*cut).clone());
            let life = world.life(&power);
            tokio::select! {
                () = power.off() => drop(life),
                () = world.settles(&goal, |_| true, &at) => life.stop().await,
            }
            if !power.is_off() {
                break;
            }
            if lives.is_empty() && self.meanwhile == Meanwhile::TakeBack {
                act.take_back(world, "data").await;
                goal = goals(&subjects, act.taken_back());
            }
            lives.push(power.steps().into_iter().collect());
        }
        let power = Power::on();
        let last = world.life(&power);
        world.settles(&goal, |_| true, &at).await;
        lives.push(power.steps().into_iter().collect());
        world.clear().await;
        let nothing = Goals::new();
        world.settles(&nothing, |_| true, &format!("{at}, all deleted")).await;
        last.stop().await;
        world.settles(&nothing, |_| true, &format!("{at}, all stopped")).await;
        lives
    }

    /// Dies at every step after these deaths. A step that was not seen before adds itself. If `twice`, the successor dies
    /// too, at the first step of each kind.
    async fn die_everywhere(&mut self, before: &[&Cut], twice: bool) {
        let seen = self.run(before).await;
        if seen.len() <= before.len() {
            return;
        }
        let mut steps = seen[before.len()].clone();
        let mut visited = BTreeSet::new();
        let most = if before.is_empty() { usize::MAX } else { 1 };
        while let Some(step) = steps.difference(&visited).next().cloned() {
            for (number, done) in (1..=most).flat_map(|number| [(number, false), (number, true)]) {
                let cut = Cut { step: step.clone(), number, done };
                let deaths: Vec<&Cut> = before.iter().copied().chain([&cut]).collect();
                let lives = self.run(&deaths).await;
                steps.extend(lives[before.len().min(lives.len() - 1)].iter().cloned());
                if lives.len() <= deaths.len() {
                    break;
                }
                if twice {
                    Box::pin(self.die_everywhere(&deaths, false)).await;
                }
            }
            visited.insert(step);
        }
        if before.is_empty() {
            println!("{:?}, {:?}: {} runs, died at {visited:?}", self.act, self.meanwhile, self.runs);
            assert!(!visited.is_empty());
        }
    }
}

async fn dies_everywhere(act: Act) {
    let twice = std::env::var("BERTH_SIDECARS_KILLS").is_ok_and(|kills| kills == "2");
    for meanwhile in [Meanwhile::Nothing, Meanwhile::TakeBack] {
        if meanwhile == Meanwhile::Nothing || act.taken_back() != act.after() {
            let world = World::start().await;
            Suite { world, act, meanwhile, runs: 0 }.die_everywhere(&[], twice).await;
        }
    }
}

macro_rules! dies_at_every_step {
    ($($name:ident: $act:ident,)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            dies_everywhere(Act::$act).await;
        }
    )* };
}

dies_at_every_step! {
    death_at_any_step_of_provisioning_leaves_a_bound_volume_or_none: Provision,
    death_at_any_step_of_cloning_leaves_a_bound_volume_or_none: Clone,
    death_at_any_step_of_restoring_leaves_a_bound_volume_or_none: Restore,
    death_at_any_step_of_attaching_leaves_an_attachment_or_none: Attach,
    death_at_any_step_of_detaching_leaves_no_attachment: Detach,
    death_at_any_step_of_growing_leaves_one_size: Grow,
    death_at_any_step_of_modifying_leaves_one_set_of_attributes: Modify,
    death_at_any_step_of_taking_a_snapshot_leaves_a_bound_one_or_none: Snapshot,
    death_at_any_step_of_deleting_a_snapshot_leaves_none: DeleteSnapshot,
    death_at_any_step_of_taking_a_group_leaves_a_bound_one_or_none: Group,
    death_at_any_step_of_deleting_a_group_leaves_none: DeleteGroup,
    death_at_any_step_of_deleting_a_volume_leaves_none: DeleteVolume,
    death_at_any_step_of_deleting_everything_at_once_leaves_nothing: Leave,
}
