//! The servers we know: one connection each, and which version serves which share.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::{runtime, time::sleep};

use crate::{
    Entry, Error, Handle, Kind, Metrics, Reason, Result, Share, Target, Version,
    metrics::Meter,
    rpc::{Credential, Endpoint, Groups, SharedConnection, random},
    share::{
        Limits,
        attempt::{Again, Wire, persist},
    },
    status::{Fault, Status},
    v3, v4,
};

/// A connection that was not used for so long is closed; well before a server's lease (usually 90 s) is over.
const IDLE: Duration = Duration::from_secs(60);

/// Connections to servers, one each, made when needed and closed when idle.
#[derive(Debug, Clone, Default)]
pub struct Nfs {
    pool: Arc<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    metrics: Metrics,
    servers: Mutex<HashMap<Key, Arc<Server>>>,
    tidied: AtomicBool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    endpoint: Endpoint,
    mount_port: Option<u16>,
    credential: Credential,
}

impl Nfs {
    /// Makes a client without connections; each is made when it is first needed.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, with metrics that others share.
    pub fn with_metrics(metrics: Metrics) -> Self {
        Self { pool: Arc::new(Pool { metrics, ..Pool::default() }) }
    }

    /// The metrics of all connections of this pool.
    pub fn metrics(&self) -> &Metrics {
        &self.pool.metrics
    }

    /// Finds a share: connects if necessary, and makes sure that the share's root is there.
    ///
    /// Cheap enough to be called for every operation (one request when the server is known), and that is the way to
    /// survive a server that comes back with other handles.
    pub async fn share(&self, target: &Target) -> Result<Share> {
        let failed = |reason| Error::new("reach the share", target.to_string(), reason);
        target.check().map_err(|invalid| failed(Reason::new(Kind::Invalid, invalid.to_string())))?;
        let server = self.server(target);
        let opened = server.open(target).await;
        let (version, root) = opened.map_err(|fault| failed(server.hint(fault.into())))?;
        Ok(Share::new(server, target.clone(), version, root))
    }

    /// The same share as another user sees it, on a connection of that user's own; nobody is asked.
    pub fn share_as(&self, share: &Share, uid: u32, gid: u32, groups: &[u32]) -> Share {
        share.on(|target| {
            target.options.uid = uid;
            target.options.gid = gid;
            target.options.groups = groups.to_vec();
            self.server(target)
        })
    }

    fn server(&self, target: &Target) -> Arc<Server> {
        self.tidy();
        let key = Key {
            endpoint: endpoint(target),
            mount_port: target.options.mount_port,
            credential: credential(target),
        };
        let mut servers = self.pool.servers();
        let make = || Arc::new(Server { meter: self.pool.metrics.of(target.host()), ..Server::default() });
        servers.entry(key).or_insert_with(make).clone()
    }

    /// Starts what closes idle connections, once.
    fn tidy(&self) {
        let Ok(runtime) = runtime::Handle::try_current() else { return };
        if self.pool.tidied.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = Arc::downgrade(&self.pool);
        runtime.spawn(async move {
            loop {
                sleep(IDLE / 2).await;
                let Some(pool) = pool.upgrade() else { return };
                pool.servers().retain(|_, server| server.drop_idle() || Arc::strong_count(server) > 1);
            }
        });
    }
}

impl Pool {
    fn servers(&self) -> MutexGuard<'_, HashMap<Key, Arc<Server>>> {
        self.servers.lock()
    }
}

fn endpoint(target: &Target) -> Endpoint {
    let options = &target.options;
    Endpoint {
        host: target.host().to_owned(),
        port: options.port.unwrap_or(v3::mount::NFS_PORT),
        reserved: options.reserved_port,
        timeout: options.timeout,
    }
}

fn credential(target: &Target) -> Credential {
    let options = &target.options;
    Credential { uid: options.uid, gid: options.gid, groups: Groups::new(&options.groups) }
}

/// One server, as one user.
#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) meter: Meter,
    v3: SharedConnection<v3::Client>,
    /// The session of each minor version of NFS 4.
    v4: [SharedConnection<v4::Session>; 3],
    /// Which version found which share.
    versions: Mutex<HashMap<String, Version>>,
    /// Roots of version 3, which cost several connections to ask for.
    roots: Mutex<HashMap<String, (Handle, Limits)>>,
    /// Whether the server sees us on a port below 1024.
    reserved_port: AtomicBool,
}

impl Server {
    /// Closes what was not used for long; returns whether anything is left.
    fn drop_idle(&self) -> bool {
        let v4 = self.v4.iter().filter(|connection| connection.drop_idle(IDLE)).count();
        self.v3.drop_idle(IDLE) || v4 > 0
    }

    /// A connection that speaks this version.
    pub(crate) async fn wire(&self, target: &Target, version: Version) -> std::result::Result<Wire, Fault> {
        if let Some(minor) = version.minor() {
            let make = || {
                let (endpoint, credential, meter) =
                    (endpoint(target), credential(target), self.meter.clone());
                let name = format!("berth {} {:016x}", std::process::id(), random());
                async move { v4::Session::open(&endpoint, credential, minor, &name, &meter).await }
            };
            return Ok(Wire::V4(self.v4[minor as usize].get(make).await?));
        }
        let make = || {
            let (target, endpoint, credential) = (target.clone(), endpoint(target), credential(target));
            let meter = self.meter.clone();
            async move {
                let port = v3::mount::nfs_port(&target, &endpoint, credential).await?;
                v3::Client::open(&Endpoint { port, ..endpoint }, credential, &meter).await
            }
        };
        Ok(Wire::V3(self.v3.get(make).await?))
    }

    /// Finds the share's root, by the best version that both sides speak.
    async fn open(&self, target: &Target) -> std::result::Result<(Version, (Entry, Limits)), Fault> {
        let path = target.absolute();
        let known =
            self.versions.lock().get(&path).copied().filter(|known| target.options.versions.contains(known));
        if let Some(version) = known {
            match self.open_by(target, version).await {
                Ok(root) => return Ok((version, root)),
                Err(fault) if fault.other_version() => drop(self.versions.lock().remove(&path)),
                Err(fault) => return Err(fault),
            }
        }
        let mut first = None;
        let mut only_v3 = false;
        for &version in target.options.versions.iter().filter(|version| Some(**version) != known) {
            if only_v3 && version != Version::V3 {
                continue;
            }
            match self.open_by(target, version).await {
                Ok(root) => {
                    self.versions.lock().insert(path, version);
                    return Ok((version, root));
                }
                Err(fault) => {
                    let next = after(&fault, version);
                    if first.is_none() || first.as_ref().is_some_and(Fault::other_version) {
                        first = Some(fault);
                    }
                    match next {
                        Next::Any => {}
                        Next::V3 => only_v3 = true,
                        Next::None => break,
                    }
                }
            }
        }
        Err(first.unwrap_or_else(|| Fault::Other(Reason::new(Kind::Invalid, "no version is left to try"))))
    }

    async fn open_by(
        &self,
        target: &Target,
        version: Version,
    ) -> std::result::Result<(Entry, Limits), Fault> {
        persist(Again::Yes, &self.meter, || async {
            match self.wire(target, version).await? {
                Wire::V3(client) => {
                    self.reserved_port.store(client.on_reserved_port(), Ordering::Relaxed);
                    self.root_v3(target, &client).await
                }
                Wire::V4(session) => {
                    self.reserved_port.store(session.on_reserved_port(), Ordering::Relaxed);
                    session.heard(session.root(target).await)
                }
            }
        })
        .await
    }

    /// Adds what is the usual reason for being refused on an ordinary port; some servers hide the export instead.
    fn hint(&self, reason: Reason) -> Reason {
        let refused = matches!(reason.kind(), Kind::Permission | Kind::NotFound);
        if self.reserved_port.load(Ordering::Relaxed) || !refused {
            return reason;
        }
        let text = format!(
            "{reason}; we come from a port above 1023, which servers accept only where the export has the option \
             `insecure`"
        );
        Reason::new(reason.kind(), text)
    }

    async fn root_v3(
        &self,
        target: &Target,
        client: &v3::Client,
    ) -> std::result::Result<(Entry, Limits), Fault> {
        let path = target.absolute();
        let known = self.roots.lock().get(&path).cloned();
        if let Some((handle, limits)) = known {
            match client.attributes(&handle).await {
                Ok(attributes) => return Ok((Entry { handle, attributes }, limits)),
                Err(Fault::Status(_)) => drop(self.roots.lock().remove(&path)),
                Err(fault) => return Err(fault),
            }
        }
        let handle = v3::mount::mount(target, &endpoint(target), credential(target)).await?;
        let limits = client.limits(&handle).await?;
        let attributes = client.attributes(&handle).await?;
        self.roots.lock().insert(path, (handle.clone(), limits));
        Ok((Entry { handle, attributes }, limits))
    }
}

/// What to try when one version did not find the share.
enum Next {
    Any,
    V3,
    None,
}

fn after(fault: &Fault, version: Version) -> Next {
    match fault {
        _ if fault.other_version() => Next::Any,
        // Servers have been seen to say so to a minor version that they do not know.
        Fault::Status(Status::INVALID) if version > Version::V4_0 => Next::Any,
        // Nothing listens where version 4 must be (version 3 is asked for at the portmapper), or the export is not
        // visible in version 4's tree.
        Fault::Unreachable(_) | Fault::Status(Status::NO_ENTRY) => Next::V3,
        _ => Next::None,
    }
}
