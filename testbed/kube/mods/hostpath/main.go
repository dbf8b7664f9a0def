// Program hostpath stands in for csi-driver-host-path in the pods of the suite's mock driver.
//
// With -proxy-endpoint=tcp://:PORT each connection to the CSI socket is joined with one to that port, on which the suite
// answers the calls itself. Without, Berth's local driver answers them, which takes the same flags; the suite reads in the
// log which calls came, in the form of csi-driver-host-path, and so each is logged on its way.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	_ "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Where Berth's driver listens.
const driverSocket = "/tmp/berth.sock"

func main() {
	socket, port := "", ""
	words := []string{"driver", "local", "--endpoint=unix://" + driverSocket}
	for _, word := range os.Args[1:] {
		name, value, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
		switch name {
		case "endpoint":
			socket = "/" + strings.TrimLeft(strings.TrimPrefix(value, "unix:"), "/")
		case "proxy-endpoint":
			port = strings.TrimPrefix(value, "tcp://")
		default:
			words = append(words, word)
		}
	}
	os.Remove(socket)
	callers, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	if port != "" {
		log.Fatal(joinAll(callers, port))
	}
	log.Fatal(serveDriver(callers, words))
}

// joinAll joins each caller with a connection to the port.
func joinAll(callers net.Listener, port string) error {
	answerers, err := net.Listen("tcp", port)
	if err != nil {
		return err
	}
	for {
		caller, err := callers.Accept()
		if err != nil {
			return err
		}
		answerer, err := answerers.Accept()
		if err != nil {
			return err
		}
		go join(caller, answerer)
	}
}

// join copies both ways until one side closes, and then closes the other.
func join(one, other net.Conn) {
	done := make(chan struct{}, 2)
	copy := func(to, from net.Conn) {
		io.Copy(to, from)
		done <- struct{}{}
	}
	go copy(one, other)
	go copy(other, one)
	<-done
	one.Close()
	other.Close()
}

// serveDriver runs Berth's driver, and passes calls on to it until it ends.
func serveDriver(callers net.Listener, words []string) error {
	driver := exec.Command("/berth", words...)
	driver.Stdout, driver.Stderr = os.Stdout, os.Stderr
	if err := driver.Start(); err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for received := range signals {
			driver.Process.Signal(received)
		}
	}()
	transport := grpc.WithTransportCredentials(insecure.NewCredentials())
	connection, err := grpc.NewClient("unix://"+driverSocket, transport,
		grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{}), grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.ForceServerCodec(bytesCodec{}), grpc.UnknownServiceHandler(
		func(_ any, stream grpc.ServerStream) error { return passOn(connection, stream) }))
	go server.Serve(callers)
	return driver.Wait()
}

// passOn has the driver answer one call, and logs both.
func passOn(connection *grpc.ClientConn, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	var request, response []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	err := connection.Invoke(stream.Context(), method, &request, &response)
	logCall(method, request, response, err)
	if err != nil {
		return err
	}
	return stream.SendMsg(&response)
}

// logCall writes the line that the suite looks for. What it calls secrets is all made up.
func logCall(method string, request, response []byte, failure error) {
	type fullError struct {
		Code    codes.Code `json:"code"`
		Message string     `json:"message"`
	}
	line := struct {
		Method            string
		Request, Response json.RawMessage
		Error             string
		FullError         *fullError
	}{Method: method}
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	known, ok := found.(protoreflect.MethodDescriptor)
	if err != nil || !ok {
		return
	}
	line.Request = asJSON(known.Input(), request)
	if failure != nil {
		line.Error = failure.Error()
		line.FullError = &fullError{status.Code(failure), status.Convert(failure).Message()}
	} else {
		line.Response = asJSON(known.Output(), response)
	}
	text, err := json.Marshal(line)
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Printf("gRPCCall: %s\n", text)
}

// asJSON is a message with the names of its fields as in the protocol.
func asJSON(kind protoreflect.MessageDescriptor, encoded []byte) json.RawMessage {
	found, err := protoregistry.GlobalTypes.FindMessageByName(kind.FullName())
	if err != nil {
		return nil
	}
	message := found.New().Interface()
	if err := proto.Unmarshal(encoded, message); err != nil {
		return nil
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	if err != nil {
		return nil
	}
	return text
}

// bytesCodec passes messages on as they are.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (bytesCodec) Unmarshal(encoded []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), encoded...)
	return nil
}
