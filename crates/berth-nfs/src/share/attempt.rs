//! Trying until it works, or until there is no point in trying.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{status::Fault, v3, v4};

/// How long a server may ask us to come again later.
const PATIENCE: Duration = Duration::from_secs(60);
/// So often a connection or a session is made anew for one request.
const TRIES: u32 = 3;
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Whether a request can be sent again when it is not known whether it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Yes,
    No,
}

/// Whom we ask.
#[derive(Debug)]
pub(crate) enum Wire {
    V3(Arc<v3::Client>),
    V4(Arc<v4::Session>),
}

impl v4::Session {
    /// Passes on a result, after looking whether it is the end of this session.
    pub(crate) fn heard<T>(&self, result: Result<T, Fault>) -> Result<T, Fault> {
        if let Err(Fault::Status(status)) = &result
            && status.lost_session()
        {
            self.lose();
        }
        result
    }
}

/// Makes attempts while there is hope.
pub(crate) async fn persist<T, F>(again: Again, mut attempt: impl FnMut() -> F) -> Result<T, Fault>
where
    F: Future<Output = Result<T, Fault>>,
{
    let begun = Instant::now();
    let mut pause = SHORTEST_PAUSE;
    let mut tries = 1;
    loop {
        let fault = match attempt().await {
            Ok(done) => return Ok(done),
            Err(fault) => fault,
        };
        match &fault {
            Fault::Broken(_) if again == Again::Yes && tries < TRIES => tries += 1,
            Fault::Closed if tries < TRIES => tries += 1,
            Fault::Status(status) if status.lost_session() && tries < TRIES => tries += 1,
            Fault::Status(status) if status.later() && begun.elapsed() < PATIENCE => {
                sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            _ => return Err(fault),
        }
    }
}

/// Asks by a method that the clients of both versions have.
macro_rules! ask {
    ($share:expr, $again:ident, $method:ident($($argument:expr),*)) => {
        $crate::share::attempt::persist($crate::share::attempt::Again::$again, || async {
            match $share.wire().await? {
                $crate::share::attempt::Wire::V3(client) => client.$method($($argument),*).await,
                $crate::share::attempt::Wire::V4(session) => session.heard(session.$method($($argument),*).await),
            }
        })
        .await
    };
}

/// Asks by a method that only version 4 has.
macro_rules! ask_v4 {
    ($share:expr, $again:ident, $method:ident($($argument:expr),*)) => {
        $crate::share::attempt::persist($crate::share::attempt::Again::$again, || async {
            match $share.wire().await? {
                $crate::share::attempt::Wire::V3(_) => Err($crate::status::Fault::Status($crate::status::Status::NOT_SUPPORTED)),
                $crate::share::attempt::Wire::V4(session) => session.heard(session.$method($($argument),*).await),
            }
        })
        .await
    };
}

pub(crate) use {ask, ask_v4};
