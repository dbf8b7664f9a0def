//! Going through a tree, many directories at a time, each left only when all below it is done.

use std::collections::HashMap;

use futures_util::{StreamExt, stream::FuturesUnordered};

use crate::{Kind, Reason, Result, Share, status::Fault};

/// Directories in work at the same time.
const AT_ONCE: usize = 16;
/// A deeper tree is a server's joke.
const DEEPEST: usize = 4096;

/// What is done in each directory.
pub(super) trait Visitor {
    /// All that has to be known about one.
    type Dir;

    /// Treats a directory, and returns which directories below it are to be visited.
    async fn enter(&self, dir: &Self::Dir) -> Result<Vec<Self::Dir>>;

    /// Finishes a directory after all that are below; `false` enters it once more.
    async fn leave(&self, dir: &Self::Dir) -> Result<bool>;
}

struct Step<D> {
    dir: D,
    parent: Option<u64>,
    depth: usize,
    leaving: bool,
}

enum Outcome<D> {
    Entered(Vec<D>),
    Left,
    Again,
}

/// Visits a tree; the first failure ends it.
pub(super) async fn walk<V: Visitor>(share: &Share, visitor: &V, top: V::Dir) -> Result<()> {
    // Last in, first out: what is deep is finished before what is beside it is begun, so that little is remembered.
    let mut ready = vec![Step { dir: top, parent: None, depth: 0, leaving: false }];
    let mut running = FuturesUnordered::new();
    let mut waiting: HashMap<u64, (Step<V::Dir>, usize)> = HashMap::new();
    let mut next = 0;
    loop {
        while running.len() < AT_ONCE
            && let Some(step) = ready.pop()
        {
            running.push(take(visitor, step));
        }
        let Some(done) = running.next().await else { return Ok(()) };
        let (mut step, outcome) = done?;
        match outcome {
            Outcome::Entered(below) => {
                step.leaving = true;
                let depth = step.depth + 1;
                if depth > DEEPEST {
                    let reason = Reason::new(Kind::Protocol, "the tree has no bottom");
                    return share.with_context(Err(Fault::Other(reason)), || "go through a tree".to_owned());
                }
                if below.is_empty() {
                    ready.push(step);
                    continue;
                }
                let parent = Some(next);
                waiting.insert(next, (step, below.len()));
                next += 1;
                ready.extend(below.into_iter().map(|dir| Step { dir, parent, depth, leaving: false }));
            }
            Outcome::Again => {
                step.leaving = false;
                ready.push(step);
            }
            Outcome::Left => {
                let Some(parent) = step.parent else { continue };
                if let Some((_, below)) = waiting.get_mut(&parent) {
                    *below -= 1;
                    if *below == 0 {
                        ready.extend(waiting.remove(&parent).map(|(step, _)| step));
                    }
                }
            }
        }
    }
}

async fn take<V: Visitor>(visitor: &V, step: Step<V::Dir>) -> Result<(Step<V::Dir>, Outcome<V::Dir>)> {
    let outcome = if !step.leaving {
        Outcome::Entered(visitor.enter(&step.dir).await?)
    } else if visitor.leave(&step.dir).await? {
        Outcome::Left
    } else {
        Outcome::Again
    };
    Ok((step, outcome))
}
