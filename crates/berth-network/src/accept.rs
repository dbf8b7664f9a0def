//! Accepting connections, also when file descriptors run out.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// How long to pause if no connection can be accepted, for want of file descriptors perhaps.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The next connection, or why there is none. A failure is told after a pause: the next attempt would fail at once again, and
/// whoever accepts in a loop would keep a processor busy.
pub(crate) async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let accepted = listener.accept().await;
    if accepted.is_err() {
        tokio::time::sleep(ACCEPT_AGAIN).await;
    }
    accepted
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::fd::OwnedFd;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_listener_that_fails_is_not_asked_in_a_tight_loop() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // A listening socket that is shut down fails every accept from then on.
        let other = std::net::TcpStream::from(OwnedFd::from(listener.try_clone().unwrap()));
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        other.shutdown(Shutdown::Both).unwrap();
        let before = Instant::now();
        for _ in 0..3 {
            accept(&listener).await.unwrap_err();
        }
        assert_eq!(before.elapsed(), ACCEPT_AGAIN * 3);
    }
}
