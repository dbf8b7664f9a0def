//! What the calls about volumes take.

use std::collections::BTreeMap;

use berth_core::{Access, AccessKind, AccessMode, Capacity, VolumeCapability, VolumeId};

use crate::{
    Driver, Feature,
    backend::{
        About, Attachment, ContentSource, Error, Expanded, NewVolume, Parameters, Result, Room, Secrets,
        Volume,
    },
    call::volumes::{Attach, CreateVolume, Detach, Expand, Modify, Room as RoomCall, Validate},
    locks::{Guard, Hold, Key},
    services::rules::{self, Attaching},
};

impl Driver {
    /// The volume of that name, made if it is not there.
    pub(super) async fn ensure_volume(&self, mut call: CreateVolume) -> Result<Volume> {
        if !self.features.has(Feature::Topology) {
            call.places = None;
        }
        let _guard = self.lock_for_creation(&call)?;
        self.backend.heed(About::Class(&call.parameters), &call.secrets);
        let wanted = call.wanted();
        let Some(existing) = self.backend.find_made(&wanted).await? else {
            return self.provision(&call, wanted).await;
        };
        // It may be on its way out; then the name is free again soon.
        let _stays = self.lock([(Key::Volume(existing.id.clone()), Hold::Shared)])?;
        match rules::difference(&existing, &call) {
            None => Ok(existing),
            Some(what) => {
                Err(Error::Conflict(format!("there is a volume named {:?} already, but {what}", call.name)))
            }
        }
    }

    fn lock_for_creation(&self, call: &CreateVolume) -> Result<Guard> {
        let source = call.source.clone().map(|source| match source {
            ContentSource::Snapshot(id) => (Key::Snapshot(id), Hold::Shared),
            ContentSource::Volume(id) => (Key::Volume(id), Hold::Shared),
        });
        self.lock([(Key::VolumeName(call.name.clone()), Hold::Exclusive)].into_iter().chain(source))
    }

    async fn provision(&self, call: &CreateVolume, wanted: NewVolume) -> Result<Volume> {
        self.check_new(&call.parameters, &call.mutable, &call.capabilities).await?;
        rules::check_places(call.places.as_ref(), self.backend.node().topology.as_ref())?;
        if let Some(source) = &call.source {
            self.check_source(source, call).await?;
        }
        self.backend.create_volume(wanted).await
    }

    /// Refuses what no volume of this driver can be.
    pub(in crate::services) async fn check_new(
        &self,
        parameters: &Parameters,
        mutable: &Parameters,
        capabilities: &[VolumeCapability],
    ) -> Result<()> {
        for capability in capabilities {
            rules::check_mode(capability, self.features)?;
        }
        if !mutable.is_empty() && !self.features.has(Feature::Modify) {
            return Err(Error::Invalid("mutable_parameters are not supported by this driver".to_owned()));
        }
        self.backend.check_parameters(parameters, mutable, capabilities).await
    }

    async fn check_source(&self, source: &ContentSource, call: &CreateVolume) -> Result<()> {
        let (size, access) = match source {
            ContentSource::Snapshot(_) if !self.features.has(Feature::Snapshots) => {
                return Err(Error::Invalid("volume_content_source: this driver has no snapshots".to_owned()));
            }
            ContentSource::Volume(_) if !self.features.has(Feature::Clone) => {
                return Err(Error::Invalid(
                    "volume_content_source: this driver cannot clone volumes".to_owned(),
                ));
            }
            ContentSource::Snapshot(id) => {
                let snapshot = self.snapshot(id).await?;
                if !snapshot.ready {
                    return Err(Error::Precondition(format!("snapshot {id:?} is not ready to use yet")));
                }
                (snapshot.size, snapshot.access)
            }
            ContentSource::Volume(id) => {
                let volume = self.volume(id).await?;
                (volume.capacity, volume.access)
            }
        };
        let wanted = call.capabilities.first().map_or(access, |capability| capability.access.kind());
        if wanted != access {
            let sentence =
                format!("the source is for {access} access, the volume shall be for {wanted} access");
            return Err(Error::Invalid(sentence));
        }
        rules::check_source_size(&call.range, size)
    }

    /// Makes sure that there is no such volume.
    pub(super) async fn ensure_no_volume(&self, id: &VolumeId, secrets: &Secrets) -> Result<()> {
        let _guard = self.lock_volume(id)?;
        self.backend.heed(About::Volume(id), secrets);
        let Some(volume) = self.backend.volume(id).await? else { return self.backend.clear_volume(id).await };
        if let Some(attachment) = volume.attachments.first() {
            return Err(Error::Precondition(format!(
                "volume {id:?} is attached to node {:?}",
                attachment.node
            )));
        }
        self.check_unused_here(id)?;
        match self.backend.delete_volume(id).await {
            Err(Error::NotFound { what: "volume", .. }) => Ok(()),
            other => other,
        }
    }

    fn check_unused_here(&self, id: &VolumeId) -> Result<()> {
        match self.ledger.place_of(id) {
            Some(place) => {
                Err(Error::Precondition(format!("volume {id:?} is in use at {}", place.display())))
            }
            None => Ok(()),
        }
    }

    /// Makes sure that the volume is attached; returns the publish context.
    pub(super) async fn ensure_attached(&self, call: Attach) -> Result<BTreeMap<String, String>> {
        let _guard = self.lock_volume(&call.id)?;
        let volume = self.volume(&call.id).await?;
        if !self.backend.node_exists(&call.node).await? {
            return Err(Error::NotFound { what: "node", id: call.node.to_string() });
        }
        rules::check_mode(&call.capability, self.features)?;
        rules::check_kind(&volume, call.capability.access.kind())?;
        let attachment =
            Attachment { node: call.node, read_only: call.read_only, mode: call.capability.mode };
        let limit = match rules::check_attach(&volume.attachments, &attachment)? {
            Attaching::Repeated => None,
            Attaching::New => self.backend.node().max_volumes,
        };
        let Some(limit) = limit else { return self.backend.attach(&call.id, attachment).await };
        // Two calls that count at the same time would both find the last place free.
        let _turn = self.attaching.lock().await;
        let count = self.backend.attached_count(&attachment.node).await?;
        if count >= usize::try_from(limit).unwrap_or(usize::MAX) {
            let node = &attachment.node;
            return Err(Error::Exhausted(format!("node {node:?} has {count} volumes, its limit is {limit}")));
        }
        self.backend.attach(&call.id, attachment).await
    }

    /// Makes sure that the volume is not attached to the node, or to any.
    pub(super) async fn ensure_detached(&self, call: Detach) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        let Some(volume) = self.backend.volume(&call.id).await? else { return Ok(()) };
        let is_meant =
            |attachment: &Attachment| call.node.as_ref().is_none_or(|node| attachment.node == *node);
        if !volume.attachments.iter().any(is_meant) {
            return Ok(());
        }
        let here = self.backend.node().id;
        if self.config.check_volume_lifecycle && call.node.as_ref().is_none_or(|node| *node == here) {
            self.check_unused_here(&call.id)?;
        }
        self.backend.detach(&call.id, call.node.as_ref()).await
    }

    /// Why the volume is not as the caller thinks, if it is not.
    pub(super) async fn objection(&self, call: &Validate) -> Result<Option<String>> {
        let volume = self.volume(&call.id).await?;
        let wanted = call.capabilities.first().map_or(volume.access, |capability| capability.access.kind());
        if let Err(Error::Invalid(message)) = rules::check_kind(&volume, wanted) {
            return Ok(Some(message));
        }
        for (field, given, known) in [
            ("volume_context", &call.context, &volume.context),
            ("parameters", &call.parameters, &volume.parameters),
            ("mutable_parameters", &call.mutable, &volume.mutable),
        ] {
            if let Some(key) = rules::disagreement(given, |pair| self.backend.agrees(&volume, known, pair)) {
                return Ok(Some(format!("{field}: {key:?} is not what the volume has")));
            }
        }
        // What it was made with counts, also where the caller does not repeat it.
        match self.check_new(&volume.parameters, &call.mutable, &call.capabilities).await {
            Ok(()) => Ok(None),
            Err(Error::Invalid(message)) => Ok(Some(message)),
            Err(other) => Err(other),
        }
    }

    /// How much can still be created, which is nothing in places that are not this backend's.
    pub(super) async fn room(&self, call: RoomCall) -> Result<Room> {
        self.check_new(&call.parameters, &Parameters::new(), &call.capabilities).await?;
        let wanted = call.topology.filter(|_| self.features.has(Feature::Topology));
        let elsewhere = match (&wanted, self.backend.node().topology) {
            (Some(wanted), Some(here)) => !here.satisfies(wanted),
            _ => false,
        };
        if elsewhere {
            return Ok(Room { available: Capacity::ZERO, largest_volume: None, smallest_volume: None });
        }
        self.backend.room(&call.parameters, wanted.as_ref()).await
    }

    /// Makes sure that the volume has at least the size.
    pub(super) async fn ensure_size(&self, call: Expand) -> Result<Expanded> {
        let _guard = self.lock_volume(&call.id)?;
        let volume = self.volume(&call.id).await?;
        if let Some(capability) = &call.capability {
            rules::check_kind(&volume, capability.access.kind())?;
        }
        if call.range.limit().is_some_and(|limit| limit < volume.capacity) {
            return Err(Error::OutOfRange(format!("the volume has {} and cannot shrink", volume.capacity)));
        }
        self.backend.expand_volume(&call.id, call.range).await
    }

    /// Makes sure that the volume has the mutable parameters; none is applied unless all can be.
    pub(super) async fn ensure_mutable(&self, call: Modify) -> Result<()> {
        let _guard = self.lock_volume(&call.id)?;
        let volume = self.volume(&call.id).await?;
        let capability = any_capability(volume.access);
        self.backend.check_parameters(&volume.parameters, &call.mutable, &[capability]).await?;
        self.backend.modify_volume(&call.id, call.mutable).await
    }
}

/// A capability that says no more than what kind of access a volume is for.
fn any_capability(kind: AccessKind) -> VolumeCapability {
    let access = match kind {
        AccessKind::Block => Access::Block,
        AccessKind::Mount => Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None },
    };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}
