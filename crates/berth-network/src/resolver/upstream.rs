//! Asks the machine's own resolvers, those of `/etc/resolv.conf`, about names that are not of here.

use std::io;
use std::net::{SocketAddr, SocketAddrV6};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::message::is_refused;

const CONFIGURATION: &str = "/etc/resolv.conf";
const PORT: u16 = 53;
/// How long each may take; clients ask again after five seconds.
const PATIENCE: Duration = Duration::from_secs(2);
const LARGEST: usize = 65_536;

/// The answer to a question, by the first resolver that gives one; `own` is not asked. With `udp` it may be cut, as the client
/// got it over UDP and asks again by a connection.
pub(super) async fn ask(question: &[u8], own: Option<SocketAddr>, udp: bool) -> io::Result<Vec<u8>> {
    let text = std::fs::read_to_string(CONFIGURATION)?;
    let servers: Vec<_> = servers(&text).into_iter().filter(|server| Some(*server) != own).collect();
    ask_of(&servers, question, udp).await
}

/// As the libraries of programs do it, a resolver that refuses to say is not the last that is asked.
async fn ask_of(servers: &[SocketAddr], question: &[u8], udp: bool) -> io::Result<Vec<u8>> {
    let mut refused = None;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the machine has no name server");
    for server in servers.iter().copied() {
        let asked = async {
            if udp { by_datagram(question, server).await } else { by_connection(question, server).await }
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(answer)) if is_refused(&answer) => refused = Some(answer),
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{server} does not answer")),
        }
    }
    refused.ok_or(last)
}

fn servers(text: &str) -> Vec<SocketAddr> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let word = words.next().filter(|word| *word == "nameserver").and(words.next())?;
        // An address of a link names the interface: `fe80::1%eth0`.
        match word.split_once('%') {
            None => Some(SocketAddr::new(word.parse().ok()?, PORT)),
            Some((address, interface)) => {
                let index = interface.parse().ok().or_else(|| interface_index(interface))?;
                Some(SocketAddrV6::new(address.parse().ok()?, PORT, 0, index).into())
            }
        }
    };
    text.lines().filter_map(of_line).collect()
}

fn interface_index(name: &str) -> Option<u32> {
    let name = Some(name).filter(|name| !name.contains('/'))?;
    std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).ok()?.trim().parse().ok()
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
    use super::super::message::{A, ask as question};
    use super::*;

    #[test]
    fn name_servers_are_read() {
        let text = "# x\nnameserver 192.0.2.1\nsearch a\nnameserver odd\nnameserver ::1 # y\n\
                    nameserver fe80::1%lo\nnameserver fe80::2%7\nnameserver fe80::3%none\nnameserver fe80::4%../lo\n";
        let servers: Vec<String> = servers(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["192.0.2.1:53", "[::1]:53", "[fe80::1%1]:53", "[fe80::2%7]:53"]);
    }

    /// Answers every question, by UDP and TCP, with its own bytes and this code.
    async fn server(code: u8) -> SocketAddr {
        let connections = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = connections.local_addr().unwrap();
        let datagrams = UdpSocket::bind(at).await.unwrap();
        let answered = move |question: &[u8]| {
            let mut answer = question.to_vec();
            (answer[2], answer[3]) = (0x80, code);
            answer
        };
        tokio::spawn(async move {
            let mut buffer = [0; 512];
            loop {
                let (length, from) = datagrams.recv_from(&mut buffer).await.unwrap();
                datagrams.send_to(&answered(&buffer[..length]), from).await.unwrap();
            }
        });
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = connections.accept().await.unwrap();
                let mut length = [0; 2];
                stream.read_exact(&mut length).await.unwrap();
                let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
                stream.read_exact(&mut question).await.unwrap();
                stream.write_all(&[&length[..], &answered(&question)].concat()).await.unwrap();
            }
        });
        at
    }

    #[tokio::test]
    async fn a_name_server_that_refuses_is_not_the_last_that_is_asked() {
        let (refuses, fails) = (server(5).await, server(2).await);
        let (knows, denies) = (server(0).await, server(3).await);
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let question = question(7, "a.example", A);
        for udp in [true, false] {
            for (servers, expected) in [
                (vec![refuses, knows], Some(0)),
                (vec![gone, fails, knows], Some(0)),
                (vec![denies, knows], Some(3)),
                (vec![fails, refuses], Some(5)),
                (vec![refuses, gone], Some(5)),
                (vec![gone], None),
                (vec![], None),
            ] {
                let answer = ask_of(&servers, &question, udp).await.ok();
                assert_eq!(answer.map(|answer| answer[3]), expected, "{servers:?} {udp}");
            }
        }
    }
}
