//! Programs inside this program: what a process does that was started from our own executable with a certain first
//! argument.
//!
//! A helper has one thread and none of its caller's locks or memory, so it can be killed at any time without harm to
//! the process that started it.

/// A program inside this program.
#[derive(Debug, Clone, Copy)]
pub struct Helper {
    /// The first argument of its process, which no command of a person begins with.
    pub argument: &'static str,
    /// Takes over the process.
    pub run: fn() -> !,
}

/// Takes over the process when it was started as one of these helpers; otherwise returns at once.
///
/// A program that starts helpers from its own executable calls this first in `main`, while it has one thread.
pub fn intercept(helpers: &[Helper]) {
    let argument = std::env::args_os().nth(1);
    let is_asked_for = |helper: &&Helper| argument.as_deref().is_some_and(|word| word == helper.argument);
    if let Some(helper) = helpers.iter().find(is_asked_for) {
        (helper.run)();
    }
}
