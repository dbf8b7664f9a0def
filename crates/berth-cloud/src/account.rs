//! An account of a cloud: what may be done with its disks, and how that is carried out.
//!
//! The rules that both providers share are here, without their words: a [`Refusal`] says what is wrong, and each API has its own
//! text for it. Work that takes time is an [`Operation`]: it is recorded, answered, and carried out when it is due. A twin that is
//! killed meanwhile goes on with it at its next start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use berth_core::hex;
use berth_host::path::Dir;
use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use ring::rand::SecureRandom as _;
use tokio::sync::watch;

use crate::faults::Effects;
use crate::media::{Detached, Media};
use crate::records::{
    Attachment, Disk, DiskStatus, Instance, Operation, Progress, Record, Records, Snapshot, Work,
};

/// How often a device that is in use is asked again whether it can be detached.
const DETACH_PAUSE: Duration = Duration::from_millis(100);

/// How much an account may have.
#[derive(Debug, Clone)]
pub struct Quotas {
    /// How many disks there may be.
    pub disks: u64,
    /// How many GiB disks and snapshots may have together.
    pub capacity_gib: u64,
    /// How many disks an instance takes, where its kind does not say so.
    pub disks_per_instance: u64,
    /// How many snapshots a disk may have.
    pub snapshots_per_disk: u64,
}

/// How long work takes; the names are those of `--delay`.
#[derive(Debug, Clone, Copy)]
pub struct Delays {
    /// Until a created disk can be used.
    pub create: Duration,
    /// Until an attached disk is there.
    pub attach: Duration,
    /// Until a detached disk is gone.
    pub detach: Duration,
    /// Until a disk has its new size.
    pub resize: Duration,
    /// Until a snapshot is taken.
    pub snapshot: Duration,
    /// Until a disk has its new category.
    pub modify: Duration,
    /// How long after the end of an attach the device appears.
    pub device: Duration,
    /// How long after their creation disks and snapshots appear in lists.
    pub listed: Duration,
    /// How long a detach waits for a device that is in use before it fails.
    pub busy: Duration,
}

impl Default for Delays {
    fn default() -> Self {
        let action = Duration::from_millis(100);
        Self {
            create: Duration::ZERO,
            attach: action,
            detach: action,
            resize: action,
            snapshot: action,
            modify: action,
            device: Duration::ZERO,
            listed: Duration::ZERO,
            busy: Duration::from_secs(10),
        }
    }
}

impl Delays {
    /// The names of all delays.
    pub const NAMES: &'static [&'static str] =
        &["create", "attach", "detach", "resize", "snapshot", "modify", "device", "listed", "busy"];

    /// Sets one delay by its name; the error says what is wrong with it.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let delay = match name {
            "create" => &mut self.create,
            "attach" => &mut self.attach,
            "detach" => &mut self.detach,
            "resize" => &mut self.resize,
            "snapshot" => &mut self.snapshot,
            "modify" => &mut self.modify,
            "device" => &mut self.device,
            "listed" => &mut self.listed,
            "busy" => &mut self.busy,
            _ => return Err(format!("there is no delay `{name}`; there are {}", Self::NAMES.join(", "))),
        };
        *delay = parse_duration(value)?;
        Ok(())
    }
}

/// Reads a duration such as `250ms` or `2s`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let parsed: jiff::SignedDuration =
        text.parse().map_err(|_| format!("`{text}` is no duration such as 250ms or 2s"))?;
    Duration::try_from(parsed).map_err(|_| format!("the duration `{text}` is negative"))
}

/// What differs between providers in how disks are kept.
pub(crate) struct Rules {
    /// An instance takes one attach or detach at a time and refuses others meanwhile.
    pub(crate) one_action_per_instance: bool,
    /// Two disks of a zone must not have the same name.
    pub(crate) unique_names: bool,
    /// The name under which an attached disk appears among an instance's devices.
    pub(crate) link_name: fn(&Disk) -> String,
    /// Another name that stands for the same disk, for a fault that asks for one.
    pub(crate) other_link_name: fn(&Disk) -> String,
    /// How many disks an instance of this kind takes, if the kind says so.
    pub(crate) disks_of_kind: fn(&str) -> Option<u64>,
}

/// Why a request is not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoDisk,
    NoSnapshot,
    NoInstance,
    NameTaken,
    TooManyDisks,
    NoCapacity,
    TooManySnapshots,
    InstanceFull(u64),
    /// It is attached, here or elsewhere.
    Attached,
    NotAttached,
    /// An operation on it is under way.
    DiskBusy,
    InstanceBusy,
    OtherZone,
    /// Disks never get smaller.
    Smaller(u64),
    /// Its own storage failed.
    Broken(String),
}

impl From<berth_journal::Error> for Refusal {
    fn from(error: berth_journal::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// What a disk is to be.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewDisk {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) zone: String,
    pub(crate) size_gib: u64,
    pub(crate) snapshot: Option<String>,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) properties: BTreeMap<String, String>,
}

/// What a snapshot is to be.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewSnapshot {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) disk: String,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) properties: BTreeMap<String, String>,
}

/// One account, with its disks on this machine.
pub(crate) struct Account {
    records: Mutex<Records>,
    media: Media,
    pub(crate) rules: Rules,
    pub(crate) quotas: Quotas,
    delays: Mutex<Delays>,
    /// Held while something is created by a client token.
    pub(crate) creating: tokio::sync::Mutex<()>,
    /// Counts the ends of operations, for those who wait for one.
    ended: watch::Sender<u64>,
}

impl Account {
    /// Opens the account in a directory, and makes files and devices what its records say.
    pub(crate) fn open(
        data: &Dir,
        devices: &Path,
        rules: Rules,
        quotas: Quotas,
        delays: Delays,
    ) -> Result<Self, String> {
        let records = Records::open(data).map_err(|error| error.to_string())?;
        let media = Media::open(data, devices).map_err(|error| error.sentence())?;
        let now = Timestamp::now();
        // A disk that is being made may be there already; its operation finds it so.
        let disks: BTreeSet<_> = records.disks.keys().cloned().collect();
        let snapshots: BTreeSet<_> = records.snapshots.keys().cloned().collect();
        let mut links = Vec::new();
        for disk in records.disks.values() {
            for attachment in &disk.attachments {
                let instance = records.instances.get(&attachment.instance);
                if instance.is_some_and(|instance| instance.devices && instance.powered_on) {
                    let link = attachment.link.clone().filter(|_| attachment.link_from <= now);
                    links.push((disk.id.clone(), attachment.instance.clone(), link));
                }
            }
        }
        media.restore(&disks, &snapshots, &links).map_err(|error| error.sentence())?;
        let (ended, _) = watch::channel(0);
        Ok(Self {
            records: Mutex::new(records),
            media,
            rules,
            quotas,
            delays: Mutex::new(delays),
            creating: tokio::sync::Mutex::default(),
            ended,
        })
    }

    pub(crate) fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock()
    }

    pub(crate) fn delays(&self) -> Delays {
        *self.delays.lock()
    }

    pub(crate) fn set_delay(&self, name: &str, value: &str) -> Result<(), String> {
        self.delays.lock().set(name, value)
    }

    /// Where an instance finds its devices.
    pub(crate) fn devices_of(&self, instance: &str) -> PathBuf {
        self.media.links_of(instance)
    }

    /// Goes on with what was under way when the last twin ended.
    pub(crate) fn resume(self: &Arc<Self>) {
        let records = self.records();
        let under_way = records.operations.values().filter(|one| one.progress == Progress::UnderWay);
        let under_way: Vec<_> = under_way.map(|one| one.id).collect();
        let now = Timestamp::now();
        let late = records.disks.values().filter(|disk| disk.attachments.iter().any(|a| a.link_from > now));
        let late: Vec<_> = late.map(|disk| disk.id.clone()).collect();
        drop(records);
        for id in under_way {
            tokio::spawn(self.clone().carry_out(id));
        }
        for disk in late {
            tokio::spawn(self.clone().link_when_due(disk));
        }
    }

    /// Takes away the devices that nobody uses.
    pub(crate) fn release(&self) {
        if let Err(error) = self.media.release() {
            tracing::warn!("devices are left: {}", error.sentence());
        }
    }

    pub(crate) fn create_disk(
        self: &Arc<Self>,
        new: NewDisk,
        effects: &Effects,
    ) -> Result<(Disk, u64), Refusal> {
        let now = Timestamp::now();
        let delays = self.delays();
        let mut records = self.records();
        let size_gib = match &new.snapshot {
            Some(id) => {
                let snapshot = records.snapshots.get(id).filter(|snapshot| snapshot.ready);
                new.size_gib.max(snapshot.ok_or(Refusal::NoSnapshot)?.size_gib)
            }
            None => new.size_gib,
        };
        let same_name = |disk: &Disk| disk.name == new.name && disk.zone == new.zone;
        if self.rules.unique_names && records.disks.values().any(same_name) {
            return Err(Refusal::NameTaken);
        }
        if records.disks.len() as u64 >= self.quotas.disks {
            return Err(Refusal::TooManyDisks);
        }
        self.check_capacity(&records, size_gib)?;
        let disk = Disk {
            id: new.id,
            name: new.name,
            zone: new.zone,
            size_gib,
            status: DiskStatus::Creating,
            created: now,
            listed_from: now + delays.listed,
            source_snapshot: new.snapshot,
            tags: new.tags,
            properties: new.properties,
            attachments: Vec::new(),
        };
        records.put(&disk)?;
        let operation = self.start(&mut records, &disk, None, Work::Create, delays.create, effects)?;
        Ok((disk, operation.id))
    }

    fn check_capacity(&self, records: &Records, more_gib: u64) -> Result<(), Refusal> {
        if Self::used_gib(records).saturating_add(more_gib) > self.quotas.capacity_gib {
            return Err(Refusal::NoCapacity);
        }
        Ok(())
    }

    /// How many GiB the account's disks have together.
    pub(crate) fn used_gib(records: &Records) -> u64 {
        records.disks.values().map(|disk| disk.size_gib).sum()
    }

    pub(crate) fn delete_disk(&self, id: &str) -> Result<(), Refusal> {
        let mut records = self.records();
        let disk = records.disks.get(id).ok_or(Refusal::NoDisk)?;
        if !disk.attachments.is_empty() {
            return Err(Refusal::Attached);
        }
        if disk.status != DiskStatus::Available || records.is_busy(|one| one.disk == id) {
            return Err(Refusal::DiskBusy);
        }
        records.remove::<Disk>(&id.to_owned())?;
        // A file without a record is removed at the next start, too.
        self.media.remove_disk(id).map_err(|error| broken(&error))
    }

    /// Whether an instance has a place for one more disk.
    pub(crate) fn check_attach_limit(&self, records: &Records, instance: &Instance) -> Result<(), Refusal> {
        let limit = (self.rules.disks_of_kind)(&instance.kind).unwrap_or(self.quotas.disks_per_instance);
        let attached = records.disks.values().filter(|disk| disk.is_attached_to(&instance.id)).count() as u64;
        let coming = records.operations.values().filter(|one| {
            one.progress == Progress::UnderWay
                && one.work == Work::Attach
                && one.instance.as_deref() == Some(&instance.id)
        });
        if attached + coming.count() as u64 >= limit { Err(Refusal::InstanceFull(limit)) } else { Ok(()) }
    }

    pub(crate) fn attach(
        self: &Arc<Self>,
        id: &str,
        instance: &str,
        multiple: bool,
        effects: &Effects,
    ) -> Result<Operation, Refusal> {
        let mut records = self.records();
        let mut disk = records.disks.get(id).ok_or(Refusal::NoDisk)?.clone();
        let on = records.instances.get(instance).ok_or(Refusal::NoInstance)?.clone();
        if disk.is_attached_to(instance) || (!multiple && !disk.attachments.is_empty()) {
            return Err(Refusal::Attached);
        }
        if !matches!(disk.status, DiskStatus::Available | DiskStatus::InUse) || records.is_disk_busy(id) {
            return Err(Refusal::DiskBusy);
        }
        if disk.zone != on.zone {
            return Err(Refusal::OtherZone);
        }
        self.check_attach_limit(&records, &on)?;
        self.check_instance(&records, instance)?;
        disk.status = DiskStatus::Attaching;
        records.put(&disk)?;
        let delay = self.delays().attach;
        self.start(&mut records, &disk, Some(instance), Work::Attach, delay, effects)
    }

    fn check_instance(&self, records: &Records, instance: &str) -> Result<(), Refusal> {
        let on_it = |one: &Operation| one.instance.as_deref() == Some(instance);
        if self.rules.one_action_per_instance && records.is_busy(on_it) {
            return Err(Refusal::InstanceBusy);
        }
        Ok(())
    }

    pub(crate) fn detach(
        self: &Arc<Self>,
        id: &str,
        instance: &str,
        effects: &Effects,
    ) -> Result<Operation, Refusal> {
        let mut records = self.records();
        let mut disk = records.disks.get(id).ok_or(Refusal::NoDisk)?.clone();
        if records.is_disk_busy(id) {
            return Err(Refusal::DiskBusy);
        }
        if !disk.is_attached_to(instance) {
            return Err(Refusal::NotAttached);
        }
        self.check_instance(&records, instance)?;
        disk.status = DiskStatus::Detaching;
        records.put(&disk)?;
        let delay = self.delays().detach;
        self.start(&mut records, &disk, Some(instance), Work::Detach, delay, effects)
    }

    pub(crate) fn resize(
        self: &Arc<Self>,
        id: &str,
        size_gib: u64,
        effects: &Effects,
    ) -> Result<Operation, Refusal> {
        let mut records = self.records();
        let disk = records.disks.get(id).ok_or(Refusal::NoDisk)?.clone();
        if size_gib <= disk.size_gib {
            return Err(Refusal::Smaller(disk.size_gib));
        }
        if !matches!(disk.status, DiskStatus::Available | DiskStatus::InUse) || records.is_disk_busy(id) {
            return Err(Refusal::DiskBusy);
        }
        self.check_capacity(&records, size_gib - disk.size_gib)?;
        let delay = self.delays().resize;
        self.start(&mut records, &disk, None, Work::Resize { size_gib }, delay, effects)
    }

    /// Changes what only the provider knows of a disk.
    pub(crate) fn modify(
        self: &Arc<Self>,
        id: &str,
        properties: BTreeMap<String, String>,
        effects: &Effects,
    ) -> Result<Operation, Refusal> {
        let mut records = self.records();
        let disk = records.disks.get(id).ok_or(Refusal::NoDisk)?.clone();
        if !matches!(disk.status, DiskStatus::Available | DiskStatus::InUse) || records.is_disk_busy(id) {
            return Err(Refusal::DiskBusy);
        }
        let delay = self.delays().modify;
        self.start(&mut records, &disk, None, Work::Modify { properties }, delay, effects)
    }

    pub(crate) fn snapshot(
        self: &Arc<Self>,
        new: NewSnapshot,
        effects: &Effects,
    ) -> Result<(Snapshot, u64), Refusal> {
        let now = Timestamp::now();
        let delays = self.delays();
        let mut records = self.records();
        let disk = records.disks.get(&new.disk).ok_or(Refusal::NoDisk)?.clone();
        if disk.status == DiskStatus::Creating {
            return Err(Refusal::DiskBusy);
        }
        if self.rules.unique_names && records.snapshots.values().any(|one| one.name == new.name) {
            return Err(Refusal::NameTaken);
        }
        let of_disk = records.snapshots.values().filter(|snapshot| snapshot.disk == new.disk).count() as u64;
        if of_disk >= self.quotas.snapshots_per_disk {
            return Err(Refusal::TooManySnapshots);
        }
        let snapshot = Snapshot {
            id: new.id,
            name: new.name,
            disk: new.disk,
            zone: disk.zone.clone(),
            size_gib: disk.size_gib,
            ready: false,
            created: now,
            listed_from: now + delays.listed,
            tags: new.tags,
            properties: new.properties,
        };
        records.put(&snapshot)?;
        let work = Work::Snapshot { snapshot: snapshot.id.clone() };
        let operation = self.start(&mut records, &disk, None, work, delays.snapshot, effects)?;
        Ok((snapshot, operation.id))
    }

    pub(crate) fn delete_snapshot(&self, id: &str) -> Result<(), Refusal> {
        let mut records = self.records();
        let snapshot = records.snapshots.get(id).ok_or(Refusal::NoSnapshot)?;
        if !snapshot.ready {
            return Err(Refusal::DiskBusy);
        }
        // A disk that is being made of it still reads it.
        let is_source = |one: &Operation| {
            one.work == Work::Create
                && records.disks.get(&one.disk).and_then(|disk| disk.source_snapshot.as_deref()) == Some(id)
        };
        if records.is_busy(is_source) {
            return Err(Refusal::DiskBusy);
        }
        records.remove::<Snapshot>(&id.to_owned())?;
        self.media.remove_snapshot(id).map_err(|error| broken(&error))
    }

    /// Makes a server of the account, or changes what one is.
    pub(crate) fn put_instance(&self, instance: &Instance) -> Result<(), Refusal> {
        Ok(self.records().put(instance)?)
    }

    /// Switches a server on or off. A server without power has no devices, and what it had not written is lost.
    pub(crate) fn set_power(&self, id: &str, on: bool) -> Result<Instance, Refusal> {
        let mut records = self.records();
        let mut instance = records.instances.get(id).ok_or(Refusal::NoInstance)?.clone();
        instance.powered_on = on;
        records.put(&instance)?;
        let now = Timestamp::now();
        let attached: Vec<Disk> =
            records.disks.values().filter(|disk| disk.is_attached_to(id)).cloned().collect();
        for disk in attached.iter().filter(|_| instance.devices) {
            for attachment in disk.attachments.iter().filter(|attachment| attachment.instance == id) {
                if on {
                    self.media.attach(&disk.id).map_err(|error| broken(&error))?;
                    if let Some(link) = attachment.link.as_ref().filter(|_| attachment.link_from <= now) {
                        self.media.link(&disk.id, id, link).map_err(|error| broken(&error))?;
                    }
                } else {
                    self.take_device(disk, attachment, true).map_err(|error| broken(&error))?;
                }
            }
        }
        Ok(instance)
    }

    /// Ends a server; its disks stay, attached to nothing.
    pub(crate) fn remove_instance(&self, id: &str) -> Result<(), Refusal> {
        self.set_power(id, false)?;
        let mut records = self.records();
        let attached: Vec<Disk> =
            records.disks.values().filter(|disk| disk.is_attached_to(id)).cloned().collect();
        for mut disk in attached {
            disk.attachments.retain(|attachment| attachment.instance != id);
            if disk.attachments.is_empty() && disk.status == DiskStatus::InUse {
                disk.status = DiskStatus::Available;
            }
            records.put(&disk)?;
        }
        Ok(records.remove::<Instance>(&id.to_owned())?)
    }

    /// Returns when an operation has ended, with what it has become.
    pub(crate) async fn wait(&self, id: u64) -> Option<Operation> {
        let mut ended = self.ended.subscribe();
        loop {
            let operation = self.records().operations.get(&id).cloned();
            match operation {
                Some(operation) if operation.progress == Progress::UnderWay => {}
                other => return other,
            }
            // The sender lives in this account.
            let _ = ended.changed().await;
        }
    }

    fn start(
        self: &Arc<Self>,
        records: &mut Records,
        disk: &Disk,
        instance: Option<&str>,
        work: Work,
        delay: Duration,
        effects: &Effects,
    ) -> Result<Operation, Refusal> {
        let now = Timestamp::now();
        let operation = Operation {
            id: records.next_operation(),
            work,
            disk: disk.id.clone(),
            instance: instance.map(str::to_owned),
            zone: disk.zone.clone(),
            progress: Progress::UnderWay,
            started: now,
            due: now + delay,
            completed: None,
            doomed: effects.errored,
        };
        records.put(&operation)?;
        let device = effects.device.clone();
        let account = self.clone();
        let id = operation.id;
        tokio::spawn(async move {
            account.carry_out_with(id, device).await;
        });
        Ok(operation)
    }

    async fn carry_out(self: Arc<Self>, id: u64) {
        self.carry_out_with(id, crate::faults::Device::AsUsual).await;
    }

    async fn carry_out_with(self: Arc<Self>, id: u64, device: crate::faults::Device) {
        let Some(operation) = self.records().operations.get(&id).cloned() else { return };
        let wait = operation.due.duration_since(Timestamp::now());
        tokio::time::sleep(Duration::try_from(wait).unwrap_or_default()).await;
        let patience = tokio::time::Instant::now() + self.delays().busy;
        let outcome = loop {
            let account = self.clone();
            let (operation, device) = (operation.clone(), device.clone());
            let work = tokio::task::spawn_blocking(move || account.work(&operation, &device));
            match work.await {
                Ok(Ok(Detached::InUse)) if tokio::time::Instant::now() < patience => {
                    tokio::time::sleep(DETACH_PAUSE).await;
                }
                Ok(Ok(Detached::InUse)) => break Err("the device is in use".to_owned()),
                Ok(Ok(Detached::Done)) => break Ok(()),
                Ok(Err(why)) => break Err(why),
                Err(error) => break Err(error.to_string()),
            }
        };
        if let Err(why) = &outcome {
            tracing::warn!(operation = id, disk = operation.disk, "an operation failed: {why}");
        }
        if let Err(error) = self.end(&operation, outcome.is_ok()) {
            tracing::error!(operation = id, ?error, "the end of an operation cannot be recorded");
        }
        self.ended.send_modify(|count| *count += 1);
        if operation.work == Work::Attach {
            self.link_when_due(operation.disk).await;
        }
    }

    /// Carries an operation out, as often as it is called; in the end its result is in the records.
    fn work(&self, operation: &Operation, device: &crate::faults::Device) -> Result<Detached, String> {
        if operation.doomed {
            return Err("a fault was asked for".to_owned());
        }
        let Some(disk) = self.records().disks.get(&operation.disk).cloned() else {
            return Err("the disk is gone".to_owned());
        };
        let failed = |error: berth_host::Error| error.sentence();
        match &operation.work {
            Work::Create => {
                self.media
                    .create(&disk.id, disk.size_gib, disk.source_snapshot.as_deref())
                    .map_err(failed)?;
            }
            Work::Attach => self.attach_device(operation, disk, device)?,
            Work::Detach => {
                let instance = operation.instance.as_deref().unwrap_or_default();
                let Some(attachment) = disk.attachments.iter().find(|a| a.instance == instance) else {
                    return Ok(Detached::Done);
                };
                let powered_on = self.records().instances.get(instance).is_some_and(|one| one.powered_on);
                return self.take_device(&disk, attachment, !powered_on).map_err(failed);
            }
            Work::Resize { size_gib } => self.media.resize(&disk.id, *size_gib).map_err(failed)?,
            Work::Snapshot { snapshot } => self.media.snapshot(&disk.id, snapshot).map_err(failed)?,
            Work::Modify { .. } => {}
        }
        Ok(Detached::Done)
    }

    fn attach_device(
        &self,
        operation: &Operation,
        mut disk: Disk,
        device: &crate::faults::Device,
    ) -> Result<(), String> {
        use crate::faults::Device;
        let now = Timestamp::now();
        let instance = operation.instance.clone().unwrap_or_default();
        let (usual, other) = ((self.rules.link_name)(&disk), (self.rules.other_link_name)(&disk));
        let (link, after) = match device {
            Device::AsUsual => (Some(usual), self.delays().device),
            Device::Late(after) => (Some(usual), *after),
            Device::OtherName => (Some(other), self.delays().device),
            Device::Never => (None, Duration::ZERO),
        };
        let link_from = now + after;
        let on = self.records().instances.get(&instance).cloned();
        if on.is_some_and(|instance| instance.devices && instance.powered_on) && link.is_some() {
            self.media.attach(&disk.id).map_err(|error| error.sentence())?;
            if let Some(name) = link.as_ref().filter(|_| after.is_zero()) {
                self.media.link(&disk.id, &instance, name).map_err(|error| error.sentence())?;
            }
        }
        if !disk.is_attached_to(&instance) {
            disk.attachments.push(Attachment { instance, since: now, link, link_from });
            // Until its operation ends the disk counts as being attached.
            self.records().put(&disk).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Takes the link and, with the last one, the device away; `by_force` from whoever uses it, too.
    fn take_device(
        &self,
        disk: &Disk,
        attachment: &Attachment,
        by_force: bool,
    ) -> Result<Detached, berth_host::Error> {
        if disk.attachments.len() <= 1 {
            if by_force {
                self.media.tear_off(&disk.id)?;
            } else if self.media.detach(&disk.id)? == Detached::InUse {
                return Ok(Detached::InUse);
            }
        }
        if let Some(link) = &attachment.link {
            self.media.unlink(&attachment.instance, link)?;
        }
        Ok(Detached::Done)
    }

    /// Makes the links of a disk that appear later than its attachment.
    async fn link_when_due(self: Arc<Self>, id: String) {
        loop {
            let attachments = self.records().disks.get(&id).map(|disk| disk.attachments.clone());
            let now = Timestamp::now();
            let late = attachments.unwrap_or_default().into_iter().filter(|one| one.link_from > now);
            let Some(next) = late.map(|one| one.link_from).min() else { return };
            tokio::time::sleep(Duration::try_from(next.duration_since(now)).unwrap_or_default()).await;
            // Under the lock: a detach meanwhile takes the link away again, or has taken the attachment.
            let records = self.records();
            let Some(disk) = records.disks.get(&id) else { return };
            for attachment in disk.attachments.iter().filter(|one| one.link_from <= Timestamp::now()) {
                let on = records.instances.get(&attachment.instance);
                let is_shown = on.is_some_and(|on| on.devices && on.powered_on);
                let link = attachment.link.as_ref().filter(|_| is_shown && disk.status == DiskStatus::InUse);
                let Some(link) = link else { continue };
                if let Err(error) = self.media.link(&id, &attachment.instance, link) {
                    tracing::warn!("a device does not appear: {}", error.sentence());
                }
            }
        }
    }

    fn end(&self, operation: &Operation, is_done: bool) -> Result<(), Refusal> {
        let mut records = self.records();
        let now = Timestamp::now();
        if let Some(mut disk) = records.disks.get(&operation.disk).cloned() {
            match (&operation.work, is_done) {
                (Work::Detach, true) => {
                    let instance = operation.instance.as_deref().unwrap_or_default();
                    disk.attachments.retain(|attachment| attachment.instance != instance);
                }
                (Work::Resize { size_gib }, true) => disk.size_gib = *size_gib,
                (Work::Modify { properties }, true) => disk.properties.extend(properties.clone()),
                _ => {}
            }
            if matches!(operation.work, Work::Create | Work::Attach | Work::Detach) {
                let is_attached = !disk.attachments.is_empty();
                disk.status = if is_attached { DiskStatus::InUse } else { DiskStatus::Available };
            }
            if operation.work == Work::Create && !is_done {
                records.remove::<Disk>(&disk.id)?;
            } else {
                records.put(&disk)?;
            }
        }
        if let Work::Snapshot { snapshot } = &operation.work
            && let Some(mut snapshot) = records.snapshots.get(snapshot).cloned()
        {
            if is_done {
                snapshot.ready = true;
                records.put(&snapshot)?;
            } else {
                records.remove::<Snapshot>(&snapshot.id())?;
            }
        }
        let progress = if is_done { Progress::Completed } else { Progress::Errored };
        records.put(&Operation { progress, completed: Some(now), ..operation.clone() })?;
        Ok(())
    }
}

impl Records {
    /// Whether such an operation is under way.
    fn is_busy(&self, concerns: impl Fn(&Operation) -> bool) -> bool {
        self.operations.values().any(|one| one.progress == Progress::UnderWay && concerns(one))
    }

    /// Whether a disk is being changed; one whose snapshot is being taken is not.
    fn is_disk_busy(&self, id: &str) -> bool {
        self.is_busy(|one| one.disk == id && !matches!(one.work, Work::Snapshot { .. }))
    }
}

fn broken(error: &berth_host::Error) -> Refusal {
    Refusal::Broken(error.sentence())
}

/// Random bytes as hexadecimal text.
pub(crate) fn random_hex(bytes: usize) -> String {
    let mut buffer = vec![0; bytes];
    ring::rand::SystemRandom::new().fill(&mut buffer).expect("the kernel has random numbers");
    hex(&buffer)
}

/// A random UUID of version 4.
pub(crate) fn uuid() -> String {
    let mut digits = random_hex(16);
    digits.replace_range(12..13, "4");
    digits.replace_range(16..17, "a");
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}
