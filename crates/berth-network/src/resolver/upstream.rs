//! Asks the machine's own resolvers, those of `/etc/resolv.conf`, about names that are not of here.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

const CONFIGURATION: &str = "/etc/resolv.conf";
const PORT: u16 = 53;
/// How long each may take; clients ask again after five seconds.
const PATIENCE: Duration = Duration::from_secs(2);
const LARGEST: usize = 65_536;

/// The answer to a question, by the first resolver that gives one; `own` is not asked. With `udp` it may be cut, as the client
/// got it over UDP and asks again by a connection.
pub(super) async fn ask(question: &[u8], own: Option<SocketAddr>, udp: bool) -> io::Result<Vec<u8>> {
    let text = std::fs::read_to_string(CONFIGURATION)?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the machine has no name server");
    for server in servers(&text).into_iter().filter(|server| Some(*server) != own) {
        let asked = async {
            if udp { by_datagram(question, server).await } else { by_connection(question, server).await }
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{server} does not answer")),
        }
    }
    Err(last)
}

fn servers(text: &str) -> Vec<SocketAddr> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let address: IpAddr =
            words.next().filter(|word| *word == "nameserver").and(words.next())?.parse().ok()?;
        Some(SocketAddr::new(address, PORT))
    };
    text.lines().filter_map(of_line).collect()
}

async fn by_datagram(question: &[u8], server: SocketAddr) -> io::Result<Vec<u8>> {
    let any: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    // A socket of its own for each question has a port of its own, which others would have to guess.
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut answer = vec![0; LARGEST];
    loop {
        let length = socket.recv(&mut answer).await?;
        if answer.get(..2) == question.get(..2) && length >= 12 {
            answer.truncate(length);
            return Ok(answer);
        }
    }
}

async fn by_connection(question: &[u8], server: SocketAddr) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(question.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_all(&[&length.to_be_bytes()[..], question].concat()).await?;
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read() {
        let text = "# x\nnameserver 192.0.2.1\nsearch a\nnameserver odd\nnameserver ::1 # y\n";
        let expected: Vec<SocketAddr> = vec!["192.0.2.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()];
        assert_eq!(servers(text), expected);
    }
}
