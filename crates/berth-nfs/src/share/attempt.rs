//! Trying until it works, or until there is no point in trying.

use std::{future::Future, sync::Arc, time::Duration};

use berth_core::Backoff;
use tokio::time::{Instant, sleep};

use crate::{metrics::Meter, status::Fault, v3, v4};

/// How long a server may ask us to come again later.
const DELAY_TIMEOUT: Duration = Duration::from_secs(60);
/// So often a connection or a session is made anew for one request.
const TRIES: u32 = 3;
/// The pauses after a server asked us to come again later.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(20), longest: Duration::from_secs(1) };

/// Whether a request can be sent again when it is not known whether it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Yes,
    No,
}

/// The client of the version that is spoken.
#[derive(Debug)]
pub(crate) enum Wire {
    V3(Arc<v3::Client>),
    V4(Arc<v4::Session>),
}

impl v4::Session {
    /// Passes on a result, after checking whether it is the end of this session.
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
pub(crate) async fn persist<T, F>(
    again: Again,
    meter: &Meter,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Fault>
where
    F: Future<Output = Result<T, Fault>>,
{
    let mut attempts = Attempts::new(again);
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(fault) => attempts.wait_for_next(fault).await?,
        }
        meter.repeated();
    }
}

/// The attempts made for one request.
struct Attempts {
    again: Again,
    begun: Instant,
    /// How often a connection or a session was made.
    connections: u32,
    /// How often the server asked us to come again later.
    delays: u32,
}

impl Attempts {
    fn new(again: Again) -> Self {
        Self { again, begun: Instant::now(), connections: 1, delays: 0 }
    }

    /// Returns when another attempt is due after this fault, which is the error where there is no point in one.
    async fn wait_for_next(&mut self, fault: Fault) -> Result<(), Fault> {
        let may_connect = self.connections < TRIES;
        match &fault {
            Fault::Broken(_) if self.again == Again::Yes && may_connect => self.connections += 1,
            Fault::Closed if may_connect => self.connections += 1,
            Fault::Status(status) if status.lost_session() && may_connect => self.connections += 1,
            Fault::Status(status) if status.later() && self.begun.elapsed() < DELAY_TIMEOUT => {
                self.delays += 1;
                sleep(BACKOFF.pause(self.delays)).await;
            }
            _ => return Err(fault),
        }
        Ok(())
    }
}

/// Asks by a method that the clients of both versions have.
macro_rules! ask {
    ($share:expr, $again:ident, $method:ident($($argument:expr),*)) => {
        $crate::share::attempt::persist($crate::share::attempt::Again::$again, $share.meter(), || async {
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
        $crate::share::attempt::persist($crate::share::attempt::Again::$again, $share.meter(), || async {
            match $share.wire().await? {
                $crate::share::attempt::Wire::V3(_) => Err($crate::status::Fault::Status($crate::status::Status::NOT_SUPPORTED)),
                $crate::share::attempt::Wire::V4(session) => session.heard(session.$method($($argument),*).await),
            }
        })
        .await
    };
}

pub(crate) use {ask, ask_v4};
