//! The external components of a CSI driver, together or each alone, with upstream's command lines.

mod flags;
mod go;
pub(crate) mod registrar;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that SIGTERM and SIGINT cancel.
fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        told.cancel();
    });
    Ok(stop)
}
